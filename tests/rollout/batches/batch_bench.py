"""Helpers for tests of batches: a model whose rewards and pace a test sets, and short requests."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.rollout.api.batches import BatchRequest, BatchTask
from prorl_envs.rollout.api.types import split_job_id
from tests.support.toy import ToyModel

type Rewards = Callable[[str, int], float]


def by_sample(_: str, sample: int) -> float:
    """Return rewards that alternate between 0 and 1 within a group, so that every group is informative."""
    return float(sample % 2)


class PacedModel(ToyModel):
    """Model that finishes each episode with a reward, a function of group id and sample. It waits while the
    group or the job is held."""

    def __init__(self, renderer: TemplateRenderer, rewards: Rewards = by_sample) -> None:
        self.renderer = renderer
        super().__init__(renderer, lambda session, _: [_finish(rewards(*split_job_id(session)))])
        self._held: dict[str, asyncio.Event] = {}

    def hold(self, *names: str) -> None:
        """Do not answer these groups and jobs until they are released."""
        for name in names:
            self._held[name] = asyncio.Event()

    def release(self, *names: str) -> None:
        for name in names:
            self._held.pop(name).set()

    def release_all(self) -> None:
        self.release(*self._held)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        for name in (split_job_id(session)[0], session):
            if name in self._held:
                await self._held[name].wait()
        return await super().generate(prompt_ids, sampling, session=session)


def _finish(reward: float) -> dict[str, Any]:
    return {"tool": "finish", "arguments": {"reward": reward}}


def rows(count: int, first: int = 0, **fields: Any) -> list[BatchTask]:
    """Return tasks called t0, t1, ..."""
    return [
        BatchTask(task={"id": f"t{i}", "instruction": "Do.", **fields}) for i in range(first, first + count)
    ]


def batch(name: str = "a", tasks: int | list[BatchTask] = 4, **fields: Any) -> BatchRequest:
    """Return a batch; by default of one group of two samples."""
    if isinstance(tasks, int):
        tasks = rows(tasks)
    return BatchRequest.model_validate(
        {"id": name, "groups": 1, "samples": 2, "environment": "toy", "tasks": tasks, **fields}
    )
