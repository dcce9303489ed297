#!/bin/sh
# Train a model with the complete system: learn.sh [arguments of `python -m learn`].
#   LEARN_VENV  directory of the trainer's environment (.build/learn), about 6 GB; it is not removed. If possible, uv
#               shares the files with vLLM's environment.
# vLLM has a separate environment; see setup-vllm.sh.
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
