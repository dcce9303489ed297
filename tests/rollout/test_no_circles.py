"""A job leaves no reference cycles, because the garbage collector blocks the event loop."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from prorl_envs.config import ServiceSettings
from prorl_envs.env.node import Node
from prorl_envs.env.registry import environments
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.store.sqlite import SqliteStore
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.testing.scripted import as_message

pytestmark = [pytest.mark.anyio, pytest.mark.thorough]

JOBS = 24
TASK = {
    "id": "sum",
    "instruction": "Write 6 to sum.txt.",
    "files": {"numbers.txt": "1\n2\n3\n"},
    "checks": [{"type": "file_equals", "path": "sum.txt", "text": "6\n"}],
}
CALLS = (
    {"tool": "bash", "arguments": {"command": "cat numbers.txt"}},
    {"tool": "bash", "arguments": {"command": "echo 6 >sum.txt"}},
    {"tool": "finish", "arguments": {}},
)


class Tape:
    """Stateless model that makes these calls in every session."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        self._answers = [tuple(renderer.assistant(as_message([call]))) for call in CALLS]
        self._turns: Counter[str] = Counter()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        ids = self._answers[self._turns[session]]
        self._turns[session] += 1
        if self._turns[session] == len(CALLS):
            del self._turns[session]
        return Sampled(ids, (-0.5,) * len(ids), "stop", "1", "in-process")

    async def aclose(self) -> None:
        """Do nothing: the model has no sessions."""


@contextmanager
def collected() -> Iterator[list[object]]:
    """Collect the objects of the block that only the garbage collector frees. The list is complete at the end
    of the block."""
    found: list[object] = []
    gc.collect()
    gc.disable()
    before = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(before)
        gc.garbage.clear()
        gc.enable()


async def test_a_job_leaves_no_reference_cycle(
    driver: BubblewrapDriver, renderer: TemplateRenderer, tmp_path: Path
) -> None:
    store = SqliteStore(tmp_path / "store.db", max_results=JOBS)
    service = RolloutService(
        Node(driver, tmp_path, warm_pool_size=2),
        {"bash": environments()["bash"]},
        renderer,
        Tape(renderer),
        ServiceSettings(init=2, run=4, eval=2),
        store,
    )
    after = 0

    async def play(name: str) -> None:
        nonlocal after
        await service.groups.submit([GroupRequest(id=name, environment="bash", task=TASK, samples=JOBS)])
        wanted = after + JOBS
        while after < wanted:
            page = await service.feed.page(after, limit=JOBS, wait_s=60)
            assert all(result.reward == 1.0 for result in page.results), page.results[0].failure
            after = page.next
        while service.status().unfinished:  # noqa: ASYNC110 - the service has no event for it
            await asyncio.sleep(0)

    await service.start()
    try:
        await play("first")  # created once
        with collected() as found:
            await play("second")
    finally:
        await service.stop()
        await store.aclose()
    kinds = Counter(type(each).__qualname__ for each in found)
    assert len(found) < JOBS, f"{kinds.most_common(12)}"
