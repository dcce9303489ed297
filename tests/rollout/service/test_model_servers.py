"""A service with model servers of every kind, while servers are added, updated and removed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from prorl_envs.clock import Clock
from prorl_envs.config import ServerSettings
from prorl_envs.env.base import ReferenceCall, Task
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.detect import Servers
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.errors import Conflict, NotFound
from prorl_envs.rollout.api.types import JobState, Result, StopReason, Trajectory
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.testing.scripted import Call, ScriptBook
from tests.rollout.conftest import OpenStore
from tests.support.clock import FakeClock
from tests.support.openai_server import scripted_openai
from tests.support.scripted_servers import scripted_server
from tests.support.timed_server import TimedServer

pytestmark = pytest.mark.anyio

SAY: Call = {"tool": "say", "arguments": {"text": "one"}}
FINISH: Call = {"tool": "finish", "arguments": {}}
BOOK = ScriptBook.from_tapes({"Do ": [[SAY], [SAY], [FINISH]]})


@asynccontextmanager
async def pool_on(
    renderer: TemplateRenderer, *urls: str, clock: Clock | None = None, **options: Any
) -> AsyncIterator[ModelPool]:
    servers = Servers.of(renderer, limits=ClientLimits(attempts=1), **options)
    pool = ModelPool(servers.connect, clock=clock)
    for url in urls:
        pool.add(url)
    try:
        yield pool
    finally:
        await pool.aclose()


@asynccontextmanager
async def client_of(service: RolloutService) -> AsyncIterator[RolloutClient]:
    transport = httpx.ASGITransport(create_app(service, ServerSettings()))
    async with RolloutClient("http://127.0.0.1", transport=transport) as client:
        yield client


def check(result: Result) -> Trajectory:
    trajectory = result.trajectory
    assert trajectory is not None
    assert (trajectory.drift, trajectory.token_exact) == (0, True)
    assert (result.state, result.mask_sample) == (JobState.DONE, False)
    return trajectory


async def test_servers_of_both_kinds_serve_one_service(make_bench: Any, renderer: TemplateRenderer) -> None:
    async with (
        TimedServer(BOOK) as vllm,
        scripted_server("sglang", BOOK) as sglang,
        pool_on(renderer, vllm.url, f"sglang+{sglang.url}") as pool,
    ):
        bench = await make_bench(model=pool, run=32)
        await bench.submit(*(bench.group(f"g{number}", samples=2) for number in range(8)))
        results = await bench.finished(16)
        assert {turn.server for result in results for turn in check(result).turns} == {vllm.url, sglang.url}
        assert vllm.counts.violations == sglang.counts.violations == 0
        await bench.gone()
        assert [server.sessions for server in pool.servers] == [0, 0], "finished sessions are forgotten"
        async with client_of(bench.service) as client:
            servers = {server.url: server for server in await client.model_servers()}
            assert servers[vllm.url].protocol == "vllm" and servers[sglang.url].protocol == "sglang"
            assert servers[sglang.url].weight_version == "scripted-0"
            router = (await client.status()).router
        assert router is not None
        assert router.turns == 16 * 3
        assert router.reported_hit_rate is not None and router.expected_hit_rate is not None
        assert router.reported_hit_rate > 0.5


async def test_a_pause_longer_than_the_limit_costs_no_time(
    make_bench: Any, renderer: TemplateRenderer
) -> None:
    clock = FakeClock()
    async with TimedServer(BOOK) as server, pool_on(renderer, server.url, clock=clock) as pool:
        bench = await make_bench(model=pool, clock=clock)
        async with client_of(bench.service) as client:
            paused = await client.pause_model_servers()
            assert paused.paused and paused.in_flight == 0
            await bench.submit(bench.group("g", limits={"run_s": 60}))
            await bench.world.until(lambda: ("g", "init") in bench.world.log)
            while bench.service.status().pools["run"].active == 0:  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0)
            await clock.wait_for_sleepers(2)  # the deadlines of stage and turn
            for _ in range(10):
                clock.advance(100)
                await asyncio.sleep(0)
            assert (await client.status()).router.paused  # type: ignore[union-attr]
            assert server.counts.requests == 0
            resumed = await client.resume_model_servers("step-8")
            assert [told.supported for told in resumed.acknowledgements] == [True]
        [result] = await bench.finished(1)
    assert result.stop_reason is StopReason.FINISHED
    assert {turn.weight_version for turn in check(result).turns} == {"step-8"}
    assert result.timings.held_s == 1000
    assert result.timings.run_s == result.timings.model_s == 0


async def test_a_turn_of_two_versions_names_the_version_of_each_token(
    make_bench: Any, renderer: TemplateRenderer
) -> None:
    clock = FakeClock()
    server = TimedServer(BOOK, tokens_per_s=1.0, clock=clock)
    async with server, pool_on(renderer, server.url) as pool:
        bench = await make_bench(model=pool)
        async with client_of(bench.service) as client:
            await bench.submit(bench.group("g"))
            await clock.wait_for_sleepers()
            clock.advance(5.5)
            await client.pause_model_servers("abort", wait_s=30)
            await client.resume_model_servers("v2")
        for _ in range(3):
            await clock.wait_for_sleepers()
            clock.advance(1000)
        [result] = await bench.finished(1)
    first, *others = check(result).turns
    assert [(span.version, span.start, span.end) for span in first.version_spans] == [
        ("scripted-0", 0, 5),
        ("v2", 5, first.end - first.start),
    ]
    assert first.weight_version == "scripted-0"
    assert [(turn.weight_version, turn.version_spans) for turn in others] == [("v2", [])] * len(others)
    assert server.counts.violations == 0


async def test_results_of_a_chat_server_are_never_trained_on(
    make_bench: Any, renderer: TemplateRenderer
) -> None:
    calls = tuple(ReferenceCall(tool=call["tool"], arguments=call["arguments"]) for call in (SAY, FINISH))
    with scripted_openai([Task(id="g", instruction="Do g.", reference=calls)]) as url:
        async with pool_on(renderer, f"openai+{url}", model="reference") as pool:
            bench = await make_bench(model=pool)
            result = await bench.result(bench.group("g"))
    assert (result.state, result.reward, result.stop_reason) == (JobState.DONE, 1.0, StopReason.FINISHED)
    assert result.mask_sample
    trajectory = result.trajectory
    assert trajectory is not None
    assert not trajectory.token_exact and not any(turn.token_exact for turn in trajectory.turns)
    assert trajectory.ids and not any(trajectory.loss_mask)
    assert [message["role"] for message in result.messages] == ["user", "assistant", "tool", "assistant"]


async def test_servers_are_added_with_their_protocol_and_drained(
    make_bench: Any, renderer: TemplateRenderer
) -> None:
    async with scripted_server("sglang", BOOK) as server, pool_on(renderer) as pool:
        bench = await make_bench(model=pool)
        async with client_of(bench.service) as client:
            [added] = await client.add_model_server(server.url, protocol="sglang")
            assert (added.url, added.protocol, added.state) == (server.url, "sglang", "healthy")
            _, down = await client.add_model_server("http://127.0.0.1:9")
            assert down.state == "failing" and "127.0.0.1:9" in down.problem
            await client.remove_model_server(down.url)
            check(await bench.result(bench.group("g")))
            assert await client.remove_model_server(server.url, wait_s=5) == []
            with pytest.raises(NotFound):
                await client.remove_model_server(server.url)


async def test_a_fixed_model_cannot_be_paused(make_bench: Any) -> None:
    bench = await make_bench()
    async with client_of(bench.service) as client:
        with pytest.raises(Conflict):
            await client.pause_model_servers()
        with pytest.raises(Conflict):
            await client.resume_model_servers("1")


def test_results_of_an_older_version_are_read() -> None:
    turn = {"start": 1, "end": 2, "finish_reason": "stop", "weight_version": "7", "server": "s"}
    old = {"ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -1.0], "drift": 0}
    read = Trajectory.model_validate({**old, "turns": [{**turn, "model_s": 1.0, "tools_s": 0.0}]})
    assert read.token_exact and read.turns[0].token_exact and read.turns[0].version_spans == []


async def test_servers_added_by_callers_survive_a_restart(
    make_bench: Any, renderer: TemplateRenderer, opened: OpenStore
) -> None:
    """Resumed jobs need their servers, and the caller that added them may not notice the kill."""
    own = "http://127.0.0.1:1"
    async with (
        scripted_server("sglang", BOOK) as server,
        TimedServer(BOOK) as gone,
        opened() as store,
        pool_on(renderer, own) as first,
        pool_on(renderer) as second,
        pool_on(renderer, own) as third,
    ):
        async with client_of((await make_bench(model=first, kept_in=store)).service) as client:
            await client.add_model_server(server.url, protocol="sglang")
            await client.add_model_server(gone.url)
            await client.remove_model_server(own)
            await client.remove_model_server(gone.url)
            await client.pause_model_servers()
            await client.resume_model_servers("step-3")
        bench = await make_bench(model=second, kept_in=store)
        [known] = bench.service.model_servers.all().servers
        assert (known.url, known.protocol, known.weight_version) == (server.url, "sglang", "step-3")
        [turn, *_] = check(await bench.result(bench.group())).turns
        assert turn.weight_version == "step-3"
        async with client_of(bench.service) as client:
            assert await client.remove_model_server(server.url, wait_s=30) == []
        await make_bench(model=third, kept_in=store)
        assert [state.url for state in third.servers] == [own], "what it was started with"
