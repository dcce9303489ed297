#!/bin/sh
# Generate the example files that NeMo Gym requires, for all families and for the output of `prorl-envs new`: five rows,
# their rollouts with the scripted model, the metrics, and the verifier's cases. NeMo Gym's own commands create the
# files. The arguments are pytest's. Takes some minutes. Run this script after a change of a family's first five example
# tasks, prompt or tools; the result is the same on every run.
set -eu
cd "$(dirname "$0")/.."
base=${VENV:-.venv}
scripts/setup.sh test "$base"
for family in bash code ipython math stem swebench terminal; do
    "$base/bin/prorl-envs" nemo examples "$family" "envs/$family/nemo/server"
done
RECORD_EXAMPLES=1 exec scripts/test-nemo.sh tests/nemo/test_gym_cli.py \
    -k "reaches_reward_1 and not stepped or example_metrics" "$@"
