"""Readers of results: filters, pages, and waiting for one job or group."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from prorl_envs.config import RetentionSettings, ServerSettings
from prorl_envs.rollout.api.errors import CursorExpired
from prorl_envs.rollout.api.types import JobState
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.http.server import answering
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def over_tcp(bench: Any) -> AsyncIterator[str]:
    async with answering(create_app(bench.service, ServerSettings()), last_requests_s=1) as url:
        yield url


@pytest.fixture
async def http(bench: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Four results: a and b done, c failed, d cancelled."""
    await bench.result(bench.group("a"))
    await bench.result(bench.group("b"))
    await bench.result(bench.group("c", faults={"eval": "grader"}))
    bench.world.gates["call"] = asyncio.Event()
    await bench.submit(bench.group("d"))
    await bench.world.until(lambda: bench.world.inside["call"] == 1)
    await bench.service.groups.cancel_job("d/0")
    transport = httpx.ASGITransport(create_app(bench.service, ServerSettings(max_wait_s=60)))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@pytest.mark.parametrize(
    ("query", "jobs", "following"),
    [
        ("", ["a", "b", "c", "d"], 4),
        ("group=a", ["a"], 1),
        ("group=a&group=d", ["a", "d"], 4),
        ("state=failed&state=cancelled", ["c", "d"], 4),
        ("environment=toy&state=done", ["a", "b"], 2),
        ("environment=other", [], 4),
        ("group=none", [], 4),
        ("group=a&after=1", [], 4),
        ("limit=1&state=done&after=1", ["b"], 2),
    ],
)
async def test_a_filter_omits_results_and_its_cursor_passes_them(
    http: httpx.AsyncClient, query: str, jobs: list[str], following: int
) -> None:
    page = (await http.get(f"/v1/results?{query}")).json()
    assert [result["group_id"] for result in page["results"]] == jobs
    assert page["next"] == following


@pytest.mark.parametrize("query", ["state=running", "state=queued", f"group={'x' * 201}", "group=x&" * 101])
async def test_a_wrong_filter_is_refused(http: httpx.AsyncClient, query: str) -> None:
    response = await http.get(f"/v1/results?{query}")
    assert response.json()["error"]["type"] == "invalid_request"


async def test_waiting_for_filtered_results_passes_all_others(http: httpx.AsyncClient, bench: Any) -> None:
    waiting = asyncio.create_task(http.get("/v1/results?group=wanted&wait_s=60"))
    del bench.world.gates["call"]
    for name in ("x", "y"):
        await bench.result(bench.group(name))
    assert not waiting.done()
    await bench.result(bench.group("wanted"))
    page = (await waiting).json()
    assert [result["group_id"] for result in page["results"]] == ["wanted"]
    assert page["next"] == 7


async def test_an_expired_cursor_is_an_error_and_not_an_empty_page(make_bench: Any) -> None:
    bench = await make_bench(retention=RetentionSettings(max_results=1))
    await bench.submit(bench.group(samples=3))
    await bench.gone()
    async with over_tcp(bench) as url, RolloutClient(url) as client:
        with pytest.raises(CursorExpired):
            await client.page(1)
        assert [result.cursor for result in (await client.page()).results] == [3]


async def test_a_reader_can_wait_for_a_job_and_a_group(http: httpx.AsyncClient, bench: Any) -> None:
    await bench.submit(bench.group("g", samples=2), bench.group("h"))
    await bench.world.until(lambda: bench.world.inside["call"] == 3)
    job = asyncio.create_task(http.get("/v1/jobs/g/0?wait_s=60"))
    group = asyncio.create_task(http.get("/v1/groups/g?wait_s=60"))
    await bench.service.groups.cancel_job("h/0")
    await bench.service.groups.cancel_job("g/0")
    assert (await job).json()["state"] == "cancelled"
    assert not group.done()
    bench.world.gates["call"].set()
    assert (await group).json()["statistics"]["rewards"] == [None, 1.0]
    assert (await http.get("/v1/groups/g?wait_s=60")).json()["complete"], "what is there is not waited for"
    assert (await http.get("/v1/jobs/none/0?wait_s=60")).status_code == 404
    assert (await http.get("/v1/jobs/g/0?wait_s=61")).status_code == 422


async def test_a_wait_that_timed_out_returns_the_progress(make_bench: Any) -> None:
    clock = FakeClock()
    bench = await make_bench(clock=clock)
    bench.world.gates["call"] = asyncio.Event()
    await bench.submit(bench.group())
    await bench.world.until(lambda: bench.world.inside["call"] == 1)
    before = len(clock.sleeping)
    waiting = asyncio.create_task(bench.service.groups.job("g/0", wait_s=5))
    await clock.wait_for_sleepers(before + 1)
    clock.advance(5)
    assert (await waiting).state is JobState.RUN
    waiting = asyncio.create_task(bench.service.groups.group("g", wait_s=5))
    await clock.wait_for_sleepers(before + 1)
    await bench.service.stop()
    assert (await waiting).complete


async def test_the_results_of_a_stopped_service_are_returned_without_a_wait(bench: Any) -> None:
    async with over_tcp(bench) as url, RolloutClient(url) as client:
        await bench.submit(bench.group(samples=3))
        first = await client.page(wait_s=20, limit=1)
        await bench.finished(3)
        await bench.service.stop()
        rest = await client.page(first.next, wait_s=20)
        assert [result.cursor for result in first.results + rest.results] == [1, 2, 3]
        assert (await client.page(3, wait_s=20)).results == []
