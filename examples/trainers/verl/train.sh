#!/bin/sh
# verl on episodes of the rollout service: train.sh tasks.jsonl [verl's overrides]. Edit the model and the lengths.
# verl starts its own vLLM servers and prints their addresses (LLMServerManager: [...]); give each to the service,
# once: curl -X POST http://127.0.0.1:8600/v1/model_servers --json '{"url": "http://HOST:PORT"}'
set -eu
here=$(dirname "$0")
tasks=$1
shift
python "$here/../make_data.py" verl "$tasks" train.parquet --environment bash
agent=actor_rollout_ref.rollout.agent
exec python -m verl.trainer.main_ppo \
    trainer.use_v1=True trainer.v1.trainer_mode=separate_async \
    data.train_files=train.parquet data.val_files=train.parquet \
    data.max_prompt_length=4096 data.max_response_length=28672 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=Qwen/Qwen3-4B \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
    "$agent.agent_loop_config_path=$here/agent.yaml" \
    "++$agent.agent_loop_manager_class=prorl_envs.trainers.verl.RolloutManager" \
    "$@"
