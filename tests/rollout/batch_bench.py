"""What tests of batches share: a model whose rewards and pace a test decides, and short requests."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from prorl_envs.policy.rendering import TemplateRenderer
from prorl_envs.policy.types import Sampled, Sampling
from prorl_envs.rollout.batch_types import BatchRequest, BatchTask
from prorl_envs.rollout.types import split_job_id
from prorl_envs.testing.toy import ToyModel

type Rewards = Callable[[str, int], float]


def by_sample(_: str, sample: int) -> float:
    """Every group is informative: its samples alternate between 0 and 1."""
    return float(sample % 2)


class PacedModel(ToyModel):
    """Finishes each episode with the reward that a function of group id and sample gives, as soon as
    neither its group nor its job is held."""

    def __init__(self, renderer: TemplateRenderer, rewards: Rewards = by_sample) -> None:
        self.renderer = renderer
        super().__init__(renderer, lambda session, _: [_finish(rewards(*split_job_id(session)))])
        self._held: dict[str, asyncio.Event] = {}

    def hold(self, *names: str) -> None:
        """Answer nothing of these groups and jobs until they are released."""
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
    """Tasks called t0, t1, ..."""
    return [
        BatchTask(task={"id": f"t{i}", "instruction": "Do.", **fields}) for i in range(first, first + count)
    ]


def batch(name: str = "a", tasks: int | list[BatchTask] = 4, **fields: Any) -> BatchRequest:
    """A batch of one group of two samples, if nothing else is said."""
    if isinstance(tasks, int):
        tasks = rows(tasks)
    return BatchRequest.model_validate(
        {"id": name, "groups": 1, "samples": 2, "environment": "toy", "tasks": tasks, **fields}
    )
