#!/bin/sh
# Run the tests against a real vLLM on the CPU, in its own environment: test-vllm.sh [pytest arguments].
# The variables are those of setup-vllm.sh. A tiny model is made and kept beside it.
set -eu
cd "$(dirname "$0")/.."
python=$(scripts/setup-vllm.sh)
TEST_VLLM_PYTHON="$python" exec "${VENV:-.venv}/bin/python" -m pytest -m vllm -n 0 tests/vllm "$@"
