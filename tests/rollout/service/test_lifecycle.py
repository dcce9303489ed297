"""Operation of a running service: pause, resume, drain; and jobs started before a restart."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from prorl_envs.config import ServerSettings
from prorl_envs.errors import FailureKind
from prorl_envs.rollout.api.errors import Unavailable
from prorl_envs.rollout.api.types import GroupRequest, JobState
from prorl_envs.rollout.api.views import Pause
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.service.recovery import MAX_INTERRUPTIONS
from prorl_envs.rollout.store.base import NewGroup
from prorl_envs.rollout.store.sqlite import MemoryStore, SqliteStore
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def talking(bench: Any, **options: Any) -> AsyncIterator[RolloutClient]:
    transport = httpx.ASGITransport(create_app(bench.service, ServerSettings()))
    async with RolloutClient("http://127.0.0.1", transport=transport, **options) as client:
        yield client


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path)
    try:
        yield store
    finally:
        await store.aclose()


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_held_service_accepts_jobs_and_starts_no_stage(bench: Any) -> None:
    bench.world.gates["call"] = asyncio.Event()
    async with talking(bench) as client:
        await client.submit([bench.group("running")])
        await bench.world.until(lambda: bench.world.inside["call"] == 1)
        assert (await client.pause()).paused == "hold"
        await client.submit([bench.group("waiting")])
        bench.world.gates["call"].set()
        await bench.world.until(lambda: bench.world.inside["call"] == 0)
        await turns()
        status = await client.status()
        assert (status.paused, status.state) == ("hold", "serving")
        assert (status.pools["eval"].waiting, status.pools["init"].waiting) == (1, 1)
        assert bench.world.log.count(("waiting", "init")) == 0
        assert (await client.resume()).paused is None
        assert {r.reward for r in await bench.finished(2)} == {1.0}


async def test_a_finishing_service_completes_started_jobs(bench: Any) -> None:
    bench.world.gates["call"] = asyncio.Event()
    async with talking(bench) as client:
        await client.submit([bench.group("running")])
        await bench.world.until(lambda: bench.world.inside["call"] == 1)
        assert (await client.pause(Pause.FINISH)).paused == "finish"
        await client.submit([bench.group("waiting")])
        bench.world.gates["call"].set()
        [result] = await bench.finished(1)
        assert result.group_id == "running"
        await bench.idle()
        assert (await client.job("waiting/0")).state is JobState.QUEUED
        await client.cancel_job("waiting/0")
        await client.resume()


async def test_a_drained_service_refuses_jobs_and_can_resume(bench: Any) -> None:
    bench.world.gates["call"] = asyncio.Event()
    async with talking(bench, attempts=1) as client:
        await client.submit([bench.group("accepted")])
        await bench.world.until(lambda: bench.world.inside["call"] == 1)
        status = await client.drain()
        assert (status.state, status.unfinished) == ("draining", 1)
        with pytest.raises(Unavailable, match="draining") as refused:
            await client.submit([bench.group("late")])
        assert refused.value.retry_after_s > 0
        draining = asyncio.create_task(client.drain(wait_s=60))
        await turns()
        assert not draining.done()
        bench.world.gates["call"].set()
        assert (await draining).unfinished == 0
        assert (await client.page()).results[0].reward == 1.0, "readers still read"
        assert (await client.resume()).state == "serving"
        await client.submit([bench.group("late")])
        await bench.finished(2)


async def test_readiness_shows_a_drain(bench: Any) -> None:
    transport = httpx.ASGITransport(create_app(bench.service, ServerSettings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        await http.post("/v1/pause", json={"mode": "finish"})
        assert (await http.get("/ready")).status_code == 200, "a paused service takes submissions"
        assert (await http.post("/v1/pause", json={"mode": "freeze"})).status_code == 422
        await http.post("/v1/drain")
        answer = await http.get("/ready")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        await bench.service.stop()
        assert (await http.post("/v1/resume")).status_code == 503, "a stop is final"
        assert (await http.post("/v1/drain")).status_code == 503


async def test_a_paused_service_stops_without_waiting_for_held_jobs(bench: Any) -> None:
    bench.service.pause(Pause.HOLD)
    await bench.submit(bench.group(samples=3))
    await bench.service.stop(drain_s=3600)
    assert {result.state for result in await bench.finished(3)} == {JobState.CANCELLED}


async def test_the_client_waits_as_long_as_the_service_asks() -> None:
    later = {"error": {"type": "full", "message": "no room", "hint": ""}}
    answers = iter(
        [
            httpx.Response(429, json=later, headers={"Retry-After": "7"}),
            httpx.Response(429, json=later, headers={"Retry-After": "86400"}),
            httpx.Response(429, json=later, headers={"Retry-After": "Thu, 01 Jan 2099 00:00:00 GMT"}),
            httpx.Response(200, json={"results": [], "next": 0}),
        ]
    )
    clock = FakeClock()
    transport = httpx.MockTransport(lambda _: next(answers))
    async with RolloutClient("http://127.0.0.1", transport=transport, clock=clock, pause_s=1) as client:
        asking = asyncio.create_task(client.page())
        waited = []
        for _ in range(3):
            await clock.wait_for_sleepers()
            waited.append(clock.sleeping[0] - clock.monotonic())
            clock.advance(waited[-1])
        assert (await asking).next == 0
    assert waited == [7, 60, 4], "what it asks for, but no longer than a minute; else the client's own pause"


async def test_a_missing_environment_fails_its_jobs_and_blocks_no_others(
    make_bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path / "store.db") as store:
        gone = {
            "id": "old",
            "environment": "gone",
            "task": {"id": "t"},
            "samples": 2,
            "metadata": {"step": 1},
        }
        wrong = {"id": "wrong", "environment": "toy", "task": {"id": "t"}}
        good = {"id": "good", "environment": "toy", "task": {"id": "t", "instruction": "do"}}
        requests = [GroupRequest.model_validate(fields) for fields in (gone, wrong, good)]
        await store.submit([NewGroup(request, "t") for request in requests])
        await store.started("old/1", 1, 0)
        bench = await make_bench(kept_in=store)
        results = {result.job_id: result for result in await bench.finished(4)}
        assert results["good/0"].reward == 1.0
        for job in ("old/0", "old/1", "wrong/0"):
            assert results[job].failure.kind is FailureKind.ENVIRONMENT
            assert (results[job].state, results[job].reward, results[job].mask_sample) == (
                "failed",
                None,
                True,
            )
        assert "gone" in results["old/0"].failure.message
        assert (results["old/1"].attempts, results["old/1"].metadata) == (1, {"step": 1})
        assert sum("cannot be resumed" in record.message for record in caplog.records) == 2
        assert (await bench.service.groups.group("old")).complete
        assert bench.service.status().failures == {"environment": 3}
        await bench.service.stop()


async def test_a_restart_repeats_an_interrupted_attempt_but_counts_earlier_failures(
    make_bench: Any, tmp_path: Path
) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        bench = await make_bench(kept_in=store, attempts=2)
        bench.world.gates["init"] = asyncio.Event()
        faulty = bench.group("failed-once", faults={"init": "sandbox"})
        await bench.submit(faulty, bench.group("interrupted", faults={"call": "hang"}))
        await bench.world.until(lambda: bench.world.inside["init"] == 2)
        bench.world.gates["init"].set()
        bench.world.gates["init"] = asyncio.Event()  # the second attempt waits here
        await bench.world.until(lambda: bench.world.log.count(("failed-once", "init")) == 2)
        await bench.world.until(lambda: bench.world.inside["call"] == 1)
        await bench.service.stop()
    async with opened(path) as store:
        [first, second] = await store.unfinished()
        assert (first.jobs[0].attempts, first.failures) == (2, (1,))
        assert (second.jobs[0].attempts, second.failures) == (1, (0,))
        bench = await make_bench(kept_in=store, attempts=2)
        await bench.service.groups.cancel_job("interrupted/0")
        results = {result.group_id: result for result in await bench.finished(2)}
        failed = results["failed-once"]
        assert failed.failure.kind is FailureKind.SANDBOX
        assert failed.attempts == 3, "one failed, one was interrupted, and the last one failed"
        await bench.service.stop()


class Counting(MemoryStore):
    """Store that records the starts for which the service waits."""

    durable = True

    def __init__(self) -> None:
        super().__init__()
        self.waited_for: list[tuple[str, bool]] = []

    async def started(self, job_id: str, attempts: int, failures: int, *, at_once: bool = True) -> None:
        self.waited_for.append((job_id, at_once))
        await super().started(job_id, attempts, failures, at_once=at_once)


async def test_only_a_jobs_possibly_last_start_is_waited_for(make_bench: Any) -> None:
    store = Counting()
    bench = await make_bench(kept_in=store, attempts=2)
    await bench.submit(bench.group("fails-once", faults={"init": "sandbox"}))
    await bench.finished(1)
    bench.world.gates["init"] = asyncio.Event()
    await bench.submit(bench.group("interrupted"))
    await bench.world.until(lambda: bench.world.inside["init"] == 1)
    await bench.service.stop()
    bench = await make_bench(kept_in=store)
    await bench.finished(2)
    assert store.waited_for == [
        ("fails-once/0", False),
        ("fails-once/0", True),
        ("interrupted/0", False),
        ("interrupted/0", True),
    ]


async def test_a_job_that_repeatedly_kills_its_service_fails(make_bench: Any, tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        task = {"id": "t", "instruction": "do"}
        request = GroupRequest(id="g", environment="toy", task=task, samples=2)
        await store.submit([NewGroup(request, "t")])
        await store.started("g/0", MAX_INTERRUPTIONS, 0)
        await store.started("g/1", MAX_INTERRUPTIONS - 1, 0)
        bench = await make_bench(kept_in=store)
        results = {result.sample: result for result in await bench.finished(2)}
        assert results[0].failure.kind is FailureKind.INTERNAL
        assert results[0].attempts == MAX_INTERRUPTIONS
        assert results[1].reward == 1.0
        await bench.service.stop()
