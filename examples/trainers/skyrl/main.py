"""SkyRL's trainer on episodes of the rollout service. Takes SkyRL's own overrides. docs/trainers/skyrl.md has
the commands for data, model servers, service and training.

SkyRL's inference servers are the service's model servers: give their addresses to `prorl-envs serve --llm`.
"""

import sys
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from prorl_envs.trainers.asking import connect
from prorl_envs.trainers.skyrl import RolloutGenerator
from prorl_envs.trainers.weights import weights_change

SERVICE, ENVIRONMENT = "http://127.0.0.1:8600", "bash"


class Trainer(RayPPOTrainer):  # type: ignore[misc]  # SkyRL ships no types
    """SkyRL's trainer, whose service is told of new weights."""

    def init_weight_sync_state(self) -> None:
        super().init_weight_sync_state()
        save = self.dispatch.save_weights_for_sampler

        async def with_weight_announcements() -> None:
            async with connect(SERVICE) as client, weights_change(client, self.global_step):
                await save()

        self.dispatch.save_weights_for_sampler = with_weight_announcements


class Experiment(BasePPOExp):  # type: ignore[misc]
    """SkyRL's experiment, with the service for a generator."""

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> RolloutGenerator:
        step_wise = cfg.generator.step_wise_trajectories
        return RolloutGenerator(SERVICE, ENVIRONMENT, end_token=tokenizer.eos_token_id, step_wise=step_wise)

    def get_trainer(self, *args: Any, **options: Any) -> Trainer:
        return Trainer(*args, **options)


def train(cfg: Any) -> None:
    Experiment(cfg).run()


if __name__ == "__main__":
    config = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(config)
    initialize_ray(config)
    ray.get(ray.remote(num_cpus=1)(train).remote(config))
