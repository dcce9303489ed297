#!/bin/sh
# Train a model through the whole system: learn.sh [arguments of `python -m learn`].
#   LEARN_VENV  the trainer's environment (.build/learn); kept, about 6 GB, which uv shares with vLLM's if it can.
# vLLM has its own environment: see setup-vllm.sh.
set -eu
cd "$(dirname "$0")/.."
venv=${LEARN_VENV:-.build/learn}
base=${VENV:-.venv}

. scripts/common.sh

vllm=$(scripts/setup-vllm.sh)
wanted=$(cat learn/requirements.txt pyproject.toml | cksum)
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    say "setting up $venv with $(tr '\n' ' ' <learn/requirements.txt)"
    [ -x "$venv/bin/python" ] || scripts/uv.sh venv --python "$base/bin/python" "$venv"
    scripts/uv.sh pip install --python "$venv/bin/python" -r learn/requirements.txt -e . \
        || fail "the trainer could not be installed" "it needs PyPI and 6 GB; see the messages above"
    printf '%s' "$wanted" >"$venv/.installed"
fi
exec "$venv/bin/python" -m learn --vllm "$vllm" "$@"
