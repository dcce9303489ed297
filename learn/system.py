"""Environment of the trainer: the rollout service, the transfer of weights, and the held-out tasks."""

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
from prorl_envs import Environment, Prompt, Result
from prorl_envs.catalog import Catalog
from prorl_envs.config import load_settings
from prorl_envs.trainers.asking import GroupTemplate, collect, connect_sync
from tests.support.vllm_server import VllmServer, free_port, process, wait_until_healthy


@contextmanager
def rollout_service(settings: Path, model_server: str, tokenizer: str, log: Path) -> Iterator[str]:
    """Run `prorl-envs serve` in its own process for the duration of the block; yield its URL."""
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
    """Transfer of a trainer's weights to a model server that shares its file system.

    Args:
        server: the model server.
        folder: holds the newest weights.
    """

    server: VllmServer
    folder: Path

    def __call__(self, trainer: Any, version: int) -> None:
        """Transfer like `prorl_envs.trainers.trl.UploadWeights`: turns are held meanwhile."""
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(self.folder)
        self.server.load(self.folder)


@dataclass(frozen=True, slots=True)
class Examination:
    """Evaluation on held-out tasks, one episode each.

    Args:
        service: URL of the rollout service.
        environment: the tasks' environment.
        rows: the tasks.
        levels: level of each task, reported separately.
    """

    service: str
    environment: str
    rows: Sequence[dict[str, Any]]
    levels: Sequence[int]

    def __call__(self) -> dict[str, Any]:
        """Evaluate the served model: see `summary`."""
        asking = GroupTemplate(self.service, self.environment)
        groups = [asking.group(str(index), row, 1) for index, row in enumerate(self.rows)]
        with connect_sync(self.service) as client:
            results = [samples[0] for samples in collect(client, groups)]
        return summary(results, self.levels)


def summary(results: Sequence[Result], levels: Sequence[int]) -> dict[str, Any]:
    """Summarise results.

    Args:
        results: one for each task.
        levels: level of each task.

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
    """Return the environment of a plan's tasks.

    Raises:
        InputError: the service's settings do not name it.
    """
    return Catalog.of(load_settings(plan.service, os.environ)).family(plan.environment)


def opening(family: type[Environment[Any]], row: Mapping[str, Any]) -> Prompt:
    """Return the messages of a model at the start of a task, without a sandbox."""
    environment = family.__new__(family)  # prompts need no sandbox
    return environment.prompt(family.load(row))
