"""Readers of results: filters, pages, lines, events, and waiting for one job or group."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from prorl_envs.config import RetentionSettings, ServerSettings
from prorl_envs.rollout.api.errors import CursorExpired, Unavailable
from prorl_envs.rollout.api.types import JobState, Result, Selection
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.http.routes.results import HEARTBEAT_S
from prorl_envs.rollout.http.server import answering
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio

EVENTS = {"Accept": "text/event-stream"}


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
    for path in ("/v1/results", "/v1/results/stream"):
        response = await http.get(f"{path}?{query}")
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


async def lines_of(response: httpx.Response, count: int) -> list[str]:
    """Return the first lines of an open stream."""
    lines: list[str] = []
    async for line in response.aiter_lines():
        lines.append(line)
        if len(lines) == count:
            break
    return lines


async def test_events_are_resumed_after_their_last_id(http: httpx.AsyncClient, bench: Any) -> None:
    async with (
        over_tcp(bench) as url,
        httpx.AsyncClient(base_url=url, headers=EVENTS) as client,
        client.stream("GET", "/v1/results/stream", headers={"Last-Event-ID": "2"}) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = await lines_of(response, 8)
    assert [lines[0], lines[1], lines[3], lines[4]] == ["id: 3", "event: result", "", "id: 4"]
    assert json.loads(lines[2].removeprefix("data: "))["group_id"] == "c"
    for wrong in ("x", "-1", str(2**63)):
        assert (await http.get("/v1/results/stream", headers={"Last-Event-ID": wrong})).status_code == 422


async def test_a_heartbeat_moves_the_cursor_of_a_filtered_reader(make_bench: Any) -> None:
    clock = FakeClock()
    bench = await make_bench(clock=clock)
    await bench.result(bench.group("other"))
    stream = "/v1/results/stream?group=wanted"
    async with over_tcp(bench) as url, httpx.AsyncClient(base_url=url) as client:
        for headers, expected in ((EVENTS, ["id: 1", ""]), ({}, [""])):
            async with client.stream("GET", stream, headers=headers) as response:
                before = len(clock.sleeping)
                reading = asyncio.create_task(lines_of(response, len(expected)))
                await clock.wait_for_sleepers(before or 1)
                clock.advance(HEARTBEAT_S)
                assert await reading == expected


async def test_an_expired_cursor_is_an_error_and_not_an_empty_stream(make_bench: Any) -> None:
    bench = await make_bench(retention=RetentionSettings(max_results=1))
    await bench.submit(bench.group(samples=3))
    await bench.gone()
    async with over_tcp(bench) as url, RolloutClient(url) as client:
        with pytest.raises(CursorExpired):
            await anext(client.stream(1))
        assert (await anext(client.stream(0))).cursor == 3


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


def line(cursor: int, group: str = "g") -> str:
    result = Result(
        cursor=cursor,
        job_id=f"{group}/0",
        group_id=group,
        sample=0,
        environment="toy",
        task_id="t",
        state=JobState.DONE,
        reward=1.0,
        mask_sample=False,
        stop_reason=None,
        failure=None,
    )
    return result.model_dump_json() + "\n"


class Breaking(httpx.AsyncByteStream):
    """Response body that ends with a broken connection, or regularly."""

    def __init__(self, text: str, *, broken: bool) -> None:
        self._text, self._broken = text, broken

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._text.encode()
        if self._broken:
            raise httpx.ReadError("the connection broke")


async def test_a_broken_stream_is_resumed() -> None:
    asked: list[str] = []
    answers: Iterator[httpx.Response | Exception] = iter(
        [
            httpx.Response(200, stream=Breaking(line(1) + "\n" + line(2) + line(3)[:20], broken=True)),
            httpx.ConnectError("refused"),
            httpx.Response(503, json={"error": {"type": "unavailable", "message": "later", "hint": ""}}),
            httpx.Response(200, stream=Breaking(line(3), broken=False)),
        ]
    )

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.query.decode())
        given = next(answers)
        if isinstance(given, Exception):
            raise given
        return given

    clock = FakeClock()
    transport = httpx.MockTransport(answer)
    async with RolloutClient("http://127.0.0.1", transport=transport, clock=clock, attempts=4) as client:

        async def read() -> list[int]:
            return [r.cursor async for r in client.stream(only=Selection(groups=frozenset({"g"})))]

        reading = asyncio.create_task(read())
        for _ in range(3):
            await clock.wait_for_sleepers()
            clock.advance(60)
        assert await reading == [1, 2, 3]
    assert asked == ["after=0&group=g", *["after=2&group=g"] * 3]


class Pieces(httpx.AsyncByteStream):
    """Response body in pieces of a few bytes."""

    def __init__(self, text: str, size: int) -> None:
        self._data, self._size = text.encode(), size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._data), self._size):
            yield self._data[start : start + self._size]


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_the_lines_of_a_stream_end_at_line_feeds_only(size: int) -> None:
    group = "a\u2028b\u2029c\x85d\x1c\x1d\x1e\x0b\x0ce\rf"
    text = f"{line(1, group)}\n{line(2)}{line(3, group)}"
    assert "\u2028" in text, "characters are not escaped"
    for body in (text, text.removesuffix("\n")):
        answer = httpx.Response(200, stream=Pieces(body, size))
        transport = httpx.MockTransport(lambda _, answer=answer: answer)
        async with RolloutClient("http://127.0.0.1", transport=transport) as client:
            read = [result.group_id async for result in client.stream()]
        assert read == [group, "g", group]


async def test_a_stream_whose_service_stays_down_raises() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    clock, transport = FakeClock(), httpx.MockTransport(refuse)
    async with RolloutClient("http://127.0.0.1", transport=transport, clock=clock, attempts=2) as client:
        reading = asyncio.ensure_future(anext(client.stream()))
        await clock.wait_for_sleepers()
        clock.advance(60)
        with pytest.raises(Unavailable):
            await reading


async def test_the_stream_of_a_stopped_service_is_closed(bench: Any) -> None:
    async with over_tcp(bench) as url, RolloutClient(url) as client:
        await bench.submit(bench.group(samples=3))
        stream = client.stream()
        first = await anext(stream)
        await bench.finished(3)
        await bench.service.stop()
        assert [first.cursor, *[result.cursor async for result in stream]] == [1, 2, 3]
