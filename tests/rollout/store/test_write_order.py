"""Order of writes and actions: a job continues only after its writes; and a store that refuses writes."""

import asyncio
from typing import Any

import pytest

from prorl_envs.rollout.api.errors import Unavailable
from prorl_envs.rollout.api.types import GroupRequest, Result
from prorl_envs.rollout.episode.engine import STORE_PAUSE_S
from prorl_envs.rollout.store.base import NewGroup
from prorl_envs.rollout.store.sqlite import MemoryStore
from tests.rollout.conftest import Bench
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio

#: Number of event loop iterations in which everything happens that is not blocked.
TURNS = 200


class HeldStore(MemoryStore):
    """Store that writes only while `open` is set, and lists the waiting writes."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.asked = asyncio.Event()
        self.starts: list[tuple[str, bool]] = []

    async def started(self, job_id: str, attempts: int, failures: int, *, at_once: bool = True) -> None:
        self.starts.append((job_id, at_once))
        self.asked.set()
        await self.open.wait()
        await super().started(job_id, attempts, failures, at_once=at_once)

    async def record(self, result: Result) -> Result:
        self.asked.set()
        await self.open.wait()
        return await super().record(result)


class FullStore(MemoryStore):
    """Durable store that refuses results while `full`."""

    durable = True

    def __init__(self) -> None:
        super().__init__()
        self.full, self.tries = True, 0

    async def record(self, result: Result) -> Result:
        self.tries += 1
        if self.full:
            raise Unavailable("the disk is full")
        return await super().record(result)


async def some_turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_a_sandbox_is_closed_only_after_its_result_is_stored(make_bench: Any) -> None:
    store = HeldStore()
    store.open.set()
    bench: Bench = await make_bench(kept_in=store)
    bench.world.gates["eval"] = asyncio.Event()
    await bench.submit(bench.group())
    await bench.world.until(lambda: bench.world.inside["eval"] == 1)
    store.open.clear()
    store.asked.clear()
    bench.world.gates["eval"].set()
    await store.asked.wait()
    await some_turns()
    open_before = bench.world.open
    store.open.set()
    assert open_before == 1, "its result was not stored yet"
    await bench.idle()
    assert [result.job_id for result in await bench.finished(1)] == ["g/0"]


async def test_an_interrupted_job_starts_only_once_its_attempt_is_stored(make_bench: Any) -> None:
    """Otherwise a job that kills every service would be tried forever."""
    store = HeldStore()
    task = {"id": "g", "instruction": "Do g."}
    request = GroupRequest(id="g", environment="toy", task=task)
    await store.submit([NewGroup(request, "g")])
    bench: Bench = await make_bench(kept_in=store)
    await store.asked.wait()
    await some_turns()
    log_before = list(bench.world.log)
    store.open.set()
    await bench.finished(1)
    assert log_before == []
    assert store.starts == [("g/0", True)], "and does not wait for others to be written with it"


async def test_a_second_attempt_is_stored_at_once(make_bench: Any) -> None:
    store = HeldStore()
    store.open.set()
    bench: Bench = await make_bench(kept_in=store)
    await bench.submit(bench.group(faults={"call": "once_sandbox"}))
    [result] = await bench.finished(1)
    assert result.attempts == 2
    assert store.starts == [("g/0", False), ("g/0", True)]


async def test_a_service_with_a_full_store_does_not_spin_and_can_stop(make_bench: Any) -> None:
    store, clock = FullStore(), FakeClock()
    bench: Bench = await make_bench(kept_in=store, clock=clock)
    try:
        await bench.submit(bench.group())
        while not store.tries:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0)
        await some_turns()
        assert store.tries == 1
        clock.advance(STORE_PAUSE_S)
        await some_turns()
        assert store.tries == 2
        stopping = asyncio.create_task(bench.service.stop())
        for _ in range(10):
            await some_turns()
            clock.advance(STORE_PAUSE_S)
        assert stopping.done()
        assert bench.world.open == 0
    finally:
        store.full = False
        clock.advance(STORE_PAUSE_S)
        await bench.service.stop()
