#!/bin/sh
# Train a model through the whole system: learn.sh [arguments of `python -m learn`].
#   LEARN_VENV  the trainer's environment (.build/learn); kept, about 6 GB, which uv shares with vLLM's where it can.
# vLLM has an environment of its own, as setup-vllm.sh says.
set -eu
cd "$(dirname "$0")/.."
venv=${LEARN_VENV:-.build/learn}
base=${VENV:-.venv}

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $1"; say "hint: $2"; exit 1; }

vllm=$(scripts/setup-vllm.sh)
uv=$(command -v uv || printf '%s' "$base/bin/uv")
wanted=$(cat learn/requirements.txt pyproject.toml | cksum)
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    say "setting up $venv with $(tr '\n' ' ' <learn/requirements.txt)"
    [ -x "$venv/bin/python" ] || "$uv" venv --quiet --python "$base/bin/python" "$venv"
    "$uv" pip install --quiet --python "$venv/bin/python" -r learn/requirements.txt -e . \
        || fail "the trainer could not be installed" "it needs PyPI and 6 GB; see the messages above"
    printf '%s' "$wanted" >"$venv/.installed"
fi
exec "$venv/bin/python" -m learn --vllm "$vllm" "$@"
