#!/bin/sh
# slime on episodes of the rollout service: run.sh tasks.jsonl [slime's arguments], in a checkout of slime. Model,
# parallelism and optimiser are slime's, as in its own scripts. The service samples on slime's SGLang router:
#   prorl-envs serve --llm sglang+http://HOST:PORT --port 8600
set -eu
here=$(dirname "$0")
tasks=$1
shift
python "$here/../make_data.py" slime "$tasks" train.jsonl
exec python train.py \
    --prompt-data train.jsonl --input-key prompt --metadata-key metadata \
    --custom-config-path "$here/slime.yaml" \
    --custom-generate-function-path prorl_envs.trainers.slime.generate \
    --dynamic-sampling-filter-path prorl_envs.trainers.slime.keep_informative \
    --rollout-batch-size 32 --over-sampling-batch-size 48 --n-samples-per-prompt 8 \
    --advantage-estimator grpo --rollout-max-response-len 2048 --rollout-temperature 1.0 \
    "$@"
