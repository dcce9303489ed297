#!/bin/sh
# OpenRLHF on episodes of the rollout service: run.sh tasks.jsonl [OpenRLHF's arguments]. Edit the model and the GPUs: four
# train here, four sample. OpenRLHF's engine samples, so the service needs no model server:
#   prorl-envs serve --tokenizer Qwen/Qwen3-4B --port 8600
set -eu
here=$(dirname "$0")
tasks=$1
shift
python "$here/../make_data.py" openrlhf "$tasks" train.jsonl
exec python -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path Qwen/Qwen3-4B --train.agent_func_path "$here/agent.py" \
    --actor.num_gpus_per_node 4 --ref.num_gpus_per_node 4 --train.colocate_actor_ref --vllm.num_engines 4 \
    --data.prompt_dataset train.jsonl --data.input_key task --data.label_key label \
    --data.max_len 32768 --rollout.n_samples_per_prompt 8 --rollout.temperature 1.0 \
    --algo.advantage.estimator group_norm --algo.advantage.is_correction_level token \
    "$@"
