"""TRL's experimental AsyncGRPOTrainer on episodes of the rollout service: rollouts go on while it trains, and
weights change under them. Edit what is in capitals, then:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend":"nccl"}' --port 8000
    prorl-envs serve --llm http://127.0.0.1:8000/v1 --port 8600
    python examples/trainers/trl/train_async.py tasks.jsonl
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params
from trl.experimental.async_grpo.vllm_client import VLLMClient
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

from prorl_envs.trainers.trl import prompts
from prorl_envs.trainers.trl_async import TrlAsyncWorker, TrlWeightTransfer

MODEL = "Qwen/Qwen3-0.6B"
SERVICE, ENVIRONMENT, MODEL_SERVER = "http://127.0.0.1:8600", "bash", "http://127.0.0.1:8000"


def transfer() -> TrlWeightTransfer:
    """TRL's transfer over NCCL, while the service holds its turns."""
    params = list(_iter_vllm_named_params(AutoModelForCausalLM.from_pretrained(MODEL)))
    manifest = {
        "names": [name for name, _ in params],
        "dtype_names": [str(param.dtype).removeprefix("torch.") for _, param in params],
        "shapes": [list(param.shape) for _, param in params],
    }
    nccl = WeightTransferClient(VLLMClient(MODEL_SERVER), manifest)
    return TrlWeightTransfer(
        SERVICE, nccl.send_weights, begin=nccl.init_weight_transfer, end=nccl.destroy, mode="keep"
    )


def main(tasks: Path) -> None:
    rows = [json.loads(line) for line in tasks.read_bytes().split(b"\n") if line.strip()]
    args = AsyncGRPOConfig(
        output_dir="runs/trl-async",
        num_generations=8,
        max_staleness=2,
        logging_steps=1,
        token_budget=32_768,
        vllm_server_base_url=MODEL_SERVER,
    )
    worker = TrlAsyncWorker(
        SERVICE, ENVIRONMENT, rows, samples=8, groups=32, max_staleness=args.max_staleness
    )
    AsyncGRPOTrainer(
        MODEL,
        args=args,
        train_dataset=Dataset.from_list(prompts(rows)),
        rollout_worker=worker,
        weight_transfer=transfer(),
    ).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
