#!/bin/sh
# Run the tests with a real vLLM on the CPU, in its own environment: test-vllm.sh [pytest arguments].
# The variables are those of setup-vllm.sh. The tests create a tiny model beside the environment, and do not remove it.
set -eu
cd "$(dirname "$0")/.."
python=$(scripts/setup-vllm.sh)
TEST_VLLM_PYTHON="$python" exec "${VENV:-.venv}/bin/python" -m pytest -m vllm -n 0 tests/vllm "$@"
