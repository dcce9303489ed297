"""Read and unread results: the ways to read results, and results that stay unread."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from prorl_envs.config import RetentionSettings, ServerSettings, TenantSettings
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.errors import NotFound
from prorl_envs.rollout.client import client as client_module
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.client.result_router import ResultRouter
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.service import read_tracker
from prorl_envs.rollout.service.read_tracker import WARN_S
from prorl_envs.rollout.store.sqlite import SqliteStore
from tests.rollout.batches.batch_bench import PacedModel, batch
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio


async def unread(bench: Any) -> list[str]:
    """Return the jobs whose results are unread."""
    store = bench.service.store
    await store.put_value("flush", "")  # acknowledgements are written with the next write
    read = {cursor for [cursor] in store._view.execute("SELECT cursor FROM read_results")}
    return sorted(result.job_id for result in await store.results(0, 100) if result.cursor not in read)


async def done(bench: Any, *names: str, samples: int = 1) -> None:
    """Run these groups, in this order."""
    for name in names:
        await bench.submit(bench.group(name, samples=samples))
        await bench.gone()


def asgi(bench: Any) -> httpx.ASGITransport:
    return httpx.ASGITransport(create_app(bench.service, ServerSettings(max_wait_s=60)))


@pytest.fixture
async def http(bench: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Three results, a to c."""
    await done(bench, "a", "b", "c")
    async with httpx.AsyncClient(transport=asgi(bench), base_url="http://127.0.0.1") as http:
        yield http


@pytest.fixture
async def client(bench: Any) -> AsyncIterator[RolloutClient]:
    async with RolloutClient("http://127.0.0.1", transport=asgi(bench), attempts=1) as client:
        yield client


async def test_a_page_is_read_when_the_next_one_is_requested(http: httpx.AsyncClient, bench: Any) -> None:
    await http.get("/v1/results?limit=2")
    assert await unread(bench) == ["a/0", "b/0", "c/0"], "the response may have been lost"
    await http.get("/v1/results?limit=2")
    assert await unread(bench) == ["a/0", "b/0", "c/0"], "it was requested again"
    await http.get("/v1/results?after=1&limit=1")
    assert await unread(bench) == ["b/0", "c/0"]
    await http.get("/v1/results?after=2")
    assert await unread(bench) == ["c/0"]
    await http.get("/v1/results?after=3")
    assert await unread(bench) == []


async def test_a_later_cursor_confirms_only_what_was_sent(http: httpx.AsyncClient, bench: Any) -> None:
    await http.get("/v1/results?after=3")
    assert await unread(bench) == ["a/0", "b/0", "c/0"]
    await http.get("/v1/results?limit=1")
    await http.get("/v1/results?after=3")
    assert await unread(bench) == ["a/0", "b/0", "c/0"], (
        "the reader of the first page did not ask for the second"
    )


async def test_a_reader_confirms_only_the_results_of_its_filter(http: httpx.AsyncClient, bench: Any) -> None:
    await http.get("/v1/results?group=a&group=b")
    for other in ("group=c", "group=a", "environment=toy", ""):
        await http.get(f"/v1/results?after=2&{other}")
        assert await unread(bench) == ["a/0", "b/0", "c/0"]
    await http.get("/v1/results?group=b&group=a&after=2")
    assert await unread(bench) == ["c/0"]


async def test_a_reader_may_look_at_results_without_reading_them(http: httpx.AsyncClient, bench: Any) -> None:
    await http.get("/v1/results?limit=2&acknowledge=false")
    await http.get("/v1/results?after=2")
    await http.get("/v1/jobs/a/0/result?acknowledge=false")
    assert await unread(bench) == ["a/0", "b/0", "c/0"]
    await http.get("/v1/results?limit=2")
    await http.get("/v1/results?after=2&acknowledge=false")
    assert await unread(bench) == ["a/0", "b/0", "c/0"]


async def test_a_result_that_was_requested_by_its_job_is_read(http: httpx.AsyncClient, bench: Any) -> None:
    assert (await http.get("/v1/jobs/b/0/result")).status_code == 200
    assert await unread(bench) == ["a/0", "c/0"]


async def test_pages_for_people_read_nothing(http: httpx.AsyncClient, bench: Any) -> None:
    for path in (
        "dashboard",
        "summaries",
        "search?text=Do",
        "jobs/a/0/tokens",
        "jobs/a/0/markdown",
        "groups/a",
    ):
        assert (await http.get(f"/v1/{path}")).status_code == 200
    assert await unread(bench) == ["a/0", "b/0", "c/0"]


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ({}, []),
        ({"up_to": 2}, ["c/0"]),
        ({"after": 1, "up_to": 2}, ["a/0", "c/0"]),
        ({"groups": ["a", "c"]}, ["b/0"]),
        ({"states": ["failed"]}, ["a/0", "b/0", "c/0"]),
        ({"environments": ["toy"], "groups": ["a"]}, ["b/0", "c/0"]),
    ],
)
async def test_results_are_acknowledged(
    http: httpx.AsyncClient, bench: Any, body: dict[str, Any], left: list[str]
) -> None:
    response = await http.post("/v1/results/acknowledge", json=body)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert await unread(bench) == left


async def test_a_tenant_acknowledges_only_its_own_results(bench: Any) -> None:
    await done(bench, "a", "alice/a")
    alice = TenantSettings(token=SecretStr("alice-has-a-long-token"))
    app = create_app(
        bench.service, ServerSettings(token=SecretStr("the-operators-token"), tenants={"alice": alice})
    )
    headers = {"Authorization": "Bearer alice-has-a-long-token"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as http:
        await http.post("/v1/results/acknowledge", json={"groups": ["a"]})
        assert await unread(bench) == ["a/0", "alice/a/0"]
        await http.post("/v1/results/acknowledge", json={})
    assert await unread(bench) == ["a/0"]


async def test_groups_that_a_client_follows_are_acknowledged_some_at_a_time(
    client: RolloutClient, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ACKNOWLEDGED_AT_ONCE", 2)
    await done(bench, "a", "b", "c", "d")
    seen = [(result.group_id, await unread(bench)) async for result in client.follow(["a", "b", "d"])]
    everything = ["a/0", "b/0", "c/0", "d/0"]
    assert seen == [("a", everything), ("b", everything), ("d", ["c/0", "d/0"])]


@pytest.mark.parametrize("filtered", [True, False])
async def test_a_client_reads_the_groups_that_it_follows_and_no_others(
    client: RolloutClient, bench: Any, monkeypatch: pytest.MonkeyPatch, filtered: bool
) -> None:
    monkeypatch.setattr(client_module, "MAX_FILTER", 100 if filtered else 0)
    await done(bench, "a", "other")
    bench.world.gates["call"] = asyncio.Event()
    await bench.submit(bench.group("b"))
    async for result in client.follow(["a", "b"]):  # on two pages
        assert {"a/0", "other/0"} <= set(await unread(bench)), result.job_id
        bench.world.gates["call"].set()
    assert await unread(bench) == ["other/0"]


async def test_a_group_that_is_not_followed_to_its_end_stays_unread(
    client: RolloutClient, bench: Any
) -> None:
    await done(bench, "a", samples=2)
    async for _ in client.follow(["a"]):
        break
    assert await unread(bench) == ["a/0", "a/1"]


async def test_pages_of_the_client_are_read(client: RolloutClient, bench: Any) -> None:
    await done(bench, "a", "b")
    page = await client.page()
    assert [result.job_id for result in page.results] == ["a/0", "b/0"]
    assert await unread(bench) == ["a/0", "b/0"]
    following = asyncio.ensure_future(client.page(page.next, wait_s=60))
    await done(bench, "c")
    assert [result.job_id for result in (await following).results] == ["c/0"]
    assert await unread(bench) == ["c/0"]


async def test_an_acknowledgement_that_fails_does_not_fail_the_reader(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await done(bench, "a")
    async with RolloutClient("http://127.0.0.1", transport=asgi(bench), attempts=1) as client:

        async def refuse(*_: Any, **__: Any) -> None:
            raise NotFound("no such route")

        monkeypatch.setattr(client, "acknowledge", refuse)
        assert [result.job_id async for result in client.follow(["a"])] == ["a/0"]
    assert await unread(bench) == ["a/0"]


async def test_a_router_reads_only_the_results_that_callers_wait_for(
    client: RolloutClient, bench: Any
) -> None:
    await done(bench, "before")
    router = ResultRouter(client)
    reading = asyncio.create_task(router.keep_reading())
    await router.ready()
    waiting = asyncio.create_task(router.result("mine/0"))
    await asyncio.sleep(0)
    await done(bench, "other", "mine")
    assert (await waiting).job_id == "mine/0"
    reading.cancel()
    await asyncio.wait([reading])
    assert await unread(bench) == ["before/0", "other/0"]


async def test_the_papers_client_has_read_its_result(bench: Any) -> None:
    await done(bench, "other")
    async with httpx.AsyncClient(transport=asgi(bench), base_url="http://127.0.0.1") as http:
        await http.post("/start")
        instance = {"data_source": "toy", "instance_id": "t", "instruction": "Do it."}
        assert (await http.post("/process", json={"instance": instance})).status_code == 200
    assert await unread(bench) == ["other/0"]


# Batches. The first group has different rewards, the second has equal ones.


@pytest.fixture
async def batches(make_bench: Any, renderer: TemplateRenderer) -> Any:
    model = PacedModel(renderer, lambda group, sample: float(sample) if group == "a/1" else 1.0)
    bench = await make_bench(model=model)
    bench.model = model
    return bench


async def test_a_batch_is_read_when_its_results_were_read_to_the_end(batches: Any) -> None:
    service = batches.service.batches
    await service.submit(batch(groups=1, in_flight=1, max_speculative_groups=0, tasks=3))
    assert (await service.view("a", wait_s=60)).state.over
    await batches.gone()
    everything = ["a/0/0", "a/0/1", "a/1/0", "a/1/1"]
    assert [r.job_id for r in (await service.results("a", 0, limit=1)).results] == ["a/1/0"]
    await service.results("a", 3, limit=9)
    assert await unread(batches) == everything, "no results were skipped: a batch has two"
    await service.results("a", 1, limit=9)
    assert await unread(batches) == ["a/0/0", "a/0/1", "a/1/1"]
    assert (await service.results("a", 2, limit=9)).results == []
    assert await unread(batches) == [], "also of the group that was not chosen"


async def test_a_client_reads_a_batch(batches: Any) -> None:
    async with RolloutClient("http://127.0.0.1", transport=asgi(batches), attempts=1) as client:
        await client.submit_batch(batch(groups=1, in_flight=1, max_speculative_groups=0, tasks=3))
        assert len([result async for result in client.batch_results("a")]) == 2
    await batches.gone()
    assert await unread(batches) == []


async def test_samples_that_a_read_batch_cancelled_are_read_when_they_end(batches: Any) -> None:
    service, model = batches.service.batches, batches.model
    model.hold("a/0")
    cancel, held = batches.service.groups.engine.cancel, asyncio.Event()

    async def cancel_later(jobs: Any) -> None:
        await held.wait()
        await cancel(jobs)

    batches.service.groups.engine.cancel = cancel_later
    await service.submit(batch(groups=1, in_flight=2, tasks=2))
    assert (await service.view("a", wait_s=60)).state.over
    assert (await service.results("a", 2, limit=9)).results == []
    assert await unread(batches) == []
    held.set()
    model.release_all()
    await batches.gone()
    assert len(await batches.service.store.results(0, 100)) == 4
    assert await unread(batches) == []


async def test_groups_that_a_later_batch_may_take_over_stay_unread(batches: Any) -> None:
    service, model = batches.service.batches, batches.model
    model.hold("a/0/1")
    await service.submit(batch(groups=1, in_flight=2, tasks=2, on_complete="carry"))
    assert (await service.view("a", wait_s=60)).carriable == 1
    await batches.finished(3)
    await service.results("a", 2, limit=9)
    assert await unread(batches) == ["a/0/0"]
    await service.submit(batch("b", groups=1, in_flight=1, tasks=0, carry_from="a", filter=None))
    model.release("a/0/1")
    assert (await service.view("b", wait_s=60)).state.over
    await batches.gone()
    assert await unread(batches) == ["a/0/0", "a/0/1"]
    await service.results("b", 2, limit=9)
    assert await unread(batches) == []


# With a store that lasts.


async def test_a_durable_service_keeps_unread_results_over_its_bounds_and_restarts(
    make_bench: Any, tmp_path: Path
) -> None:
    retention, kept = RetentionSettings(max_results=2), []
    for names, reads in ((("a", "b", "c"), False), (("d",), True)):
        async with AsyncExitStack() as stack:
            store = SqliteStore(tmp_path / "store.db", **retention.of_results)
            stack.push_async_callback(store.aclose)
            bench = await make_bench(kept_in=store, retention=retention)
            stack.push_async_callback(bench.service.stop)
            await done(bench, *names)
            async with RolloutClient("http://127.0.0.1", transport=asgi(bench), attempts=1) as client:
                page = await client.page()
                kept.append([result.job_id for result in page.results])
                if reads:
                    await client.page(page.next)
    assert kept == [["a/0", "b/0", "c/0"], ["a/0", "b/0", "c/0", "d/0"]]
    store = SqliteStore(tmp_path / "store.db", **retention.of_results)
    kept = [[result.job_id for result in await store.results(0, 10)]]
    unread = store.unread.results
    await store.aclose()
    assert (kept, unread) == ([["c/0", "d/0"]], 0)


# Warnings.


@pytest.mark.parametrize("bound", [{"max_results": 2}, {"max_tokens": 1}])
async def test_warnings_of_unread_results_over_the_bounds_are_limited(
    make_bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, bound: dict[str, int]
) -> None:
    retention, clock = RetentionSettings.model_validate(bound), FakeClock()
    store = SqliteStore(tmp_path / "store.db", **retention.of_results)
    bench = await make_bench(kept_in=store, retention=retention, clock=clock)

    def warnings() -> list[str]:
        return [entry.getMessage() for entry in caplog.records if entry.name == read_tracker.__name__]

    with caplog.at_level(logging.WARNING):
        await done(bench, "a", "b", "c", "d")
        assert len(warnings()) == 1
        clock.advance(WARN_S)
        await done(bench, "e")
    assert len(warnings()) == 2
    assert "5 results with" in warnings()[1] and "are unread" in warnings()[1]
    await bench.service.stop()
    await store.aclose()


async def test_dropped_unread_results_of_a_store_in_memory_are_counted_and_logged(
    make_bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    bench = await make_bench(retention={"max_results": 2}, clock=clock)
    with caplog.at_level(logging.WARNING, read_tracker.__name__):
        await done(bench, "a", "b")
        assert caplog.messages == []
        bench.service.store.acknowledge([1])
        await done(bench, "c")
        assert bench.service.store.unread.dropped == 0, "it was read"
        await done(bench, "d")
        assert bench.service.store.unread.dropped == 1
        await done(bench, "e")
    assert len(caplog.messages) == 1
    assert "1 unread results were dropped" in caplog.messages[0]
