#!/bin/sh
# verl on episodes of the rollout service: train.sh tasks.jsonl [verl's overrides]. Edit the model, the lengths and the
# GPUs: four train here, four sample. verl starts its own vLLM servers and prints their addresses, twice
# (LLMServerManager: [...]): first those on the GPUs that train, which sleep meanwhile, then the others. Give each of
# the others to the service: prorl-envs servers add http://HOST:PORT
set -eu
here=$(dirname "$0")
tasks=$1
shift
python "$here/../make_data.py" verl "$tasks" train.parquet --environment bash
actor=actor_rollout_ref.actor
rollout=actor_rollout_ref.rollout
exec python -m verl.trainer.main_ppo \
    trainer.use_v1=True trainer.v1.trainer_mode=separate_async \
    trainer.nnodes=1 trainer.n_gpus_per_node=4 "$rollout.nnodes=1" "$rollout.n_gpus_per_node=4" \
    data.train_files=train.parquet data.val_files=train.parquet \
    data.max_prompt_length=4096 data.max_response_length=28672 \
    data.train_batch_size=64 trainer.v1.separate_async.parameter_sync_step=4 "$actor.ppo_mini_batch_size=16" \
    "$actor.use_dynamic_bsz=True" "$actor.ppo_max_token_len_per_gpu=32768" \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=Qwen/Qwen3-4B \
    "$rollout.name=vllm" "$rollout.n=8" "$rollout.checkpoint_engine.backend=nccl" \
    "$rollout.agent.agent_loop_config_path=$here/agent.yaml" \
    "++$rollout.agent.agent_loop_manager_class=prorl_envs.trainers.verl.RolloutManager" \
    "$@"
