"""What stands around the trainer: the rollout service, the way of the weights, and the held-out tasks."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import stdev
from typing import Any

from learn.plan import Plan
from prorl_envs.catalog import Catalog
from prorl_envs.config import load_settings
from prorl_envs.env.base import Environment, Prompt
from prorl_envs.rollout.types import Result
from prorl_envs.testing.vllm_server import VllmServer, free_port, process, wait_until_healthy
from prorl_envs.trainers.asking import Asking, collect, connect_sync


@contextmanager
def rollout_service(settings: Path, model_server: str, tokenizer: str, log: Path) -> Iterator[str]:
    """`prorl-envs serve` in a process of its own, which ends with the block; yields its URL."""
    port = free_port()
    program = Path(sys.executable).with_name("prorl-envs")
    command = [str(program), "serve", "--llm", model_server, "--tokenizer", tokenizer]
    command += ["--config", str(settings), "--port", str(port), "--store", "memory"]
    with process(command, log, dict(os.environ)) as running:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, running, log)
        yield url


@dataclass(frozen=True, slots=True)
class Weights:
    """Brings a trainer's weights into a model server that sees the same files.

    Args:
        server: the model server.
        folder: for the newest weights.
    """

    server: VllmServer
    folder: Path

    def __call__(self, trainer: Any, version: int) -> None:
        """As `prorl_envs.trainers.trl.UploadWeights`: turns are held meanwhile."""
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(self.folder)
        self.server.load(self.folder)


@dataclass(frozen=True, slots=True)
class Examination:
    """Held-out tasks, each played once whenever it is asked for.

    Args:
        service: URL of the rollout service.
        environment: of the tasks.
        rows: the tasks.
        levels: of each, shown apart.
    """

    service: str
    environment: str
    rows: Sequence[dict[str, Any]]
    levels: Sequence[int]

    def __call__(self) -> dict[str, Any]:
        """How the model that is served does: see `summary`."""
        asking = Asking(self.service, self.environment)
        groups = [asking.group(str(index), row, 1) for index, row in enumerate(self.rows)]
        with connect_sync(self.service) as client:
            results = [samples[0] for samples in collect(client, groups)]
        return summary(results, self.levels)


def summary(results: Sequence[Result], levels: Sequence[int]) -> dict[str, Any]:
    """Results in a few numbers.

    Args:
        results: one for each task.
        levels: of each task.

    Returns:
        `reward`: the mean over episodes that have one, `stderr`: its standard error; `by_level`: the mean for
        each level; `scored`, `failed`: episodes; `turns`: mean number of model calls; `malformed`: share of
        episodes that ended in a call that could not be read; `versions`: versions of weights that sampled.
    """
    scored = [
        (result, level) for result, level in zip(results, levels, strict=True) if result.reward is not None
    ]
    turns = [turn for result, _ in scored for row in result.rows for turn in row.turns]
    rewards = [result.reward or 0.0 for result, _ in scored]
    return {
        "reward": _mean(rewards),
        "stderr": stdev(rewards) / sqrt(len(rewards)) if len(rewards) > 1 else None,
        "by_level": {
            str(level): _mean([result.reward or 0.0 for result, own in scored if own == level])
            for level in sorted(set(levels))
        },
        "scored": len(scored),
        "failed": len(results) - len(scored),
        "turns": len(turns) / len(scored) if scored else 0.0,
        "malformed": _mean([float(result.stop_reason == "malformed") for result, _ in scored]),
        "versions": sorted({turn.weight_version for turn in turns}),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def family_of(plan: Plan) -> type[Environment[Any]]:
    """The environment that a plan's tasks are of.

    Raises:
        InputError: the service's settings do not name it.
    """
    return Catalog.of(load_settings(plan.service, os.environ)).family(plan.environment)


def opening(family: type[Environment[Any]], row: Mapping[str, Any]) -> Prompt:
    """What a model is told at the beginning of a task, without a sandbox for it."""
    environment = family.__new__(family)  # it has no place to run in, and needs none to speak
    return environment.prompt(family.load(row))
