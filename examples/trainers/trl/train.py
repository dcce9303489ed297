"""TRL's GRPOTrainer on episodes of the rollout service. Edit what is in capitals, then:

    prorl-envs serve --llm http://127.0.0.1:8000/v1 --port 8600
    python examples/trainers/trl/train.py tasks.jsonl

The model server is a vLLM on this machine, started with VLLM_SERVER_DEV_MODE=1: new weights are saved to a
folder, and it reads them there.
"""

import json
import sys
from pathlib import Path
from typing import Any

import httpx
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from prorl_envs.trainers.trl import TrlRollouts, prompts, service_reward

MODEL = "Qwen/Qwen3-0.6B"
SERVICE, ENVIRONMENT = "http://127.0.0.1:8600", "bash"
MODEL_SERVERS = ("http://127.0.0.1:8000",)
WEIGHTS = Path("runs/trl/weights")


def upload(trainer: Any, version: int) -> None:
    """Put the trainer's weights into the servers. The service holds its turns meanwhile."""
    trainer.save_model(str(WEIGHTS))  # gathers them from all processes
    if not trainer.accelerator.is_main_process:
        return
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(WEIGHTS.resolve())}}
    for url in MODEL_SERVERS:
        httpx.post(f"{url}/collective_rpc", json=reload, timeout=600).raise_for_status()


def main(tasks: Path) -> None:
    rows = [json.loads(line) for line in tasks.read_bytes().split(b"\n") if line.strip()]
    config = GRPOConfig(
        output_dir="runs/trl",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=2048,  # of one turn
        temperature=1.0,
        learning_rate=1e-6,
        logging_steps=1,
        log_completions=True,  # with the job of each: prorl-envs show
    )
    rollouts = TrlRollouts(SERVICE, ENVIRONMENT, weights=upload)
    try:
        GRPOTrainer(
            model=MODEL,
            args=config,
            train_dataset=Dataset.from_list(prompts(rows)),
            rollout_func=rollouts,
            reward_funcs=service_reward,
        ).train()
    finally:
        rollouts.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
