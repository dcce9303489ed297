"""A pool whose servers change weights: turns wait, stop, continue or restart, and none fails."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prorl_envs.clock import Clock
from prorl_envs.errors import ModelError
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.routing.balance import ServerState
from prorl_envs.model.routing.health import due, watching
from prorl_envs.model.routing.pause_gate import ActiveTimeout, HeldTime, PauseGate
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.routing.resumable_turn import MAX_PARTS
from prorl_envs.model.servers.detect import Servers
from prorl_envs.model.types import InFlight, Sampled, Sampling, VersionSpan
from tests.model.listing import BOOK, PROMPT, RENDERER
from tests.support.clock import FakeClock
from tests.support.scripted_servers import scripted_server
from tests.support.timed_server import TimedServer

pytestmark = pytest.mark.anyio

PROTOCOLS = pytest.mark.parametrize("protocol", ["vllm", "sglang"])


@asynccontextmanager
async def pool_on(*urls: str, clock: Clock | None = None) -> AsyncIterator[ModelPool]:
    pool = ModelPool(Servers.of(RENDERER, limits=ClientLimits(attempts=1)).connect, clock=clock)
    for url in urls:
        pool.add(url)
    try:
        yield pool
    finally:
        await pool.aclose()


def turn(pool: ModelPool, session: str = "s") -> "asyncio.Task[Sampled]":
    return asyncio.create_task(pool.generate(PROMPT, Sampling(), session=session))


async def undisturbed() -> Sampled:
    async with TimedServer(BOOK) as server, pool_on(server.url) as pool:
        return await turn(pool)


async def test_turns_wait_while_weights_change() -> None:
    async with TimedServer(BOOK) as server, pool_on(server.url) as pool:
        told = await pool.pause("finish")
        assert told == [] and pool.paused
        waiting = turn(pool)
        await asyncio.sleep(0)
        assert (pool.in_flight, server.counts.requests) == (0, 0)
        [answer] = await pool.resume("v2")
        assert answer.supported and not answer.problem
        assert (await waiting).weight_version == "v2"
        assert pool.servers[0].weight_version == "v2"


@PROTOCOLS
@pytest.mark.parametrize("mode", ["finish", "abort", "keep"])
async def test_no_prefix_of_old_weights_stays_cached(protocol: str, mode: InFlight) -> None:
    async with scripted_server(protocol, BOOK) as server, pool_on(server.url) as pool:
        await turn(pool)
        await pool.pause(mode)
        before = server.counts.emptied
        await pool.resume("v2")
        assert server.counts.emptied == before + 1


async def test_mode_finish_waits_for_turns_in_flight() -> None:
    clock = FakeClock()
    async with TimedServer(BOOK, tokens_per_s=1.0, clock=clock) as server, pool_on(server.url) as pool:
        running = turn(pool)
        await clock.wait_for_sleepers()
        pausing = asyncio.create_task(pool.pause("finish", wait_s=60))
        await asyncio.sleep(0)
        later = turn(pool, "later")
        assert not pausing.done()
        clock.advance(1000)
        await pausing
        assert (pool.in_flight, (await running).finish_reason) == (0, "stop")
        assert server.counts.requests == 1
        await pool.resume()
        await clock.wait_for_sleepers()
        clock.advance(1000)
        await later


@PROTOCOLS
async def test_an_aborted_turn_continues_with_the_new_weights(protocol: str) -> None:
    whole = await undisturbed()
    clock = FakeClock()
    server = scripted_server(protocol, BOOK, tokens_per_s=1.0, clock=clock)
    async with server, pool_on(server.url) as pool:
        running = turn(pool)
        await clock.wait_for_sleepers()
        clock.advance(4.5)
        [told] = await pool.pause("abort", wait_s=60)
        assert told.supported and pool.in_flight == 0 and not running.done()
        await pool.resume("v2")
        await clock.wait_for_sleepers()
        clock.advance(1000)
        answer = await running
        assert (answer.ids, answer.logprobs) == (whole.ids, whole.logprobs), "no token twice, none lost"
        assert answer.finish_reason == "stop"
        assert answer.weight_version == "scripted-0"
        assert answer.version_spans == (
            VersionSpan(version="scripted-0", start=0, end=4),
            VersionSpan(version="v2", start=4, end=len(whole.ids)),
        )
        assert server.counts.violations == 0
        assert [len(exchange.sampled_ids) for exchange in server.exchanges] == [4, len(whole.ids) - 4]


async def test_an_aborted_turn_is_sampled_again_if_configured() -> None:
    clock = FakeClock()
    async with TimedServer(BOOK, tokens_per_s=1.0, clock=clock) as server, pool_on(server.url) as pool:
        running = turn(pool)
        await clock.wait_for_sleepers()
        clock.advance(4.5)
        await pool.pause("abort", resample=True, wait_s=60)
        await pool.resume("v2")
        await clock.wait_for_sleepers()
        clock.advance(1000)
        answer = await running
        assert (answer.weight_version, answer.version_spans) == ("v2", ())
        assert [len(exchange.prompt_ids) for exchange in server.exchanges] == [len(PROMPT)] * 2


async def test_turns_of_a_server_that_cannot_abort_are_disconnected() -> None:
    clock = FakeClock()
    server = TimedServer(BOOK, steerable=False, tokens_per_s=1.0, clock=clock)
    async with server, pool_on(server.url) as pool:
        running = turn(pool)
        await clock.wait_for_sleepers()
        [told] = await pool.pause("abort", wait_s=60)
        assert not told.supported and pool.in_flight == 0
        await server.until(lambda counts: counts.aborted == 1 and counts.running == 0)
        await pool.resume("v2")
        await server.until(lambda counts: counts.running == 1)
        await clock.wait_for_sleepers()
        clock.advance(1000)
        assert (await running).finish_reason == "stop"


@PROTOCOLS
async def test_kept_turns_stop_and_continue(protocol: str) -> None:
    whole = await undisturbed()
    clock = FakeClock()
    server = scripted_server(protocol, BOOK, tokens_per_s=1.0, clock=clock)
    async with server, pool_on(server.url) as pool:
        running = turn(pool)
        await clock.wait_for_sleepers()
        clock.advance(4.5)
        await pool.pause("keep")
        clock.advance(1000)
        assert (pool.in_flight, running.done()) == (1, False)
        await pool.resume("v2")
        await clock.wait_for_sleepers()
        clock.advance(1000)
        answer = await running
        assert answer.ids == whole.ids
        assert [span.version for span in answer.version_spans] == ["scripted-0", "v2"]
        assert answer.version_spans[0].end == 4
        assert server.counts.requests == 1


async def test_a_server_without_versions_gets_the_announced_one() -> None:
    class Plain:
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
            return Sampled((1,), (0.0,), "stop", "", "http://plain")

        async def aclose(self) -> None: ...

    pool = ModelPool(lambda url: Plain())
    pool.add("http://plain")
    assert (await pool.generate([1], Sampling(), session="s")).weight_version == ""
    await pool.pause("finish")
    [told] = await pool.resume("v3")
    assert not told.supported
    assert (await pool.generate([1], Sampling(), session="s")).weight_version == "v3"
    await pool.aclose()


async def test_a_turn_that_is_aborted_again_and_again_fails() -> None:
    class Broken:
        calls = 0

        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
            self.calls += 1
            return Sampled((), (), "abort", "1", "http://broken")

        async def aclose(self) -> None: ...

    broken = Broken()
    pool = ModelPool(lambda url: broken)
    pool.add("http://broken")
    with pytest.raises(ModelError, match="interrupted one turn"):
        await pool.generate([1], Sampling(), session="s")
    assert broken.calls == MAX_PARTS
    await pool.aclose()


async def test_a_held_turn_can_be_cancelled() -> None:
    async with TimedServer(BOOK) as server, pool_on(server.url) as pool:
        await pool.pause("finish")
        waiting = turn(pool)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool.in_flight == 0


async def test_a_dead_server_does_not_keep_the_others_from_pausing() -> None:
    async with TimedServer(BOOK) as dying:
        dead = dying.url
    async with TimedServer(BOOK) as server, pool_on(dead, server.url) as pool:
        first, second = await pool.pause("abort", wait_s=5)
        assert "cannot be reached" in first.problem
        assert second.supported and not second.problem
        assert server.engine.pauses == ["abort"]
        await pool.resume()
        assert (await pool.generate(PROMPT, Sampling(), session="s")).server == server.url


async def test_draining_waits_for_turns_in_flight() -> None:
    clock = FakeClock()
    async with TimedServer(BOOK, latency_s=5.0, clock=clock) as server, pool_on(server.url) as pool:
        running = turn(pool)
        await clock.wait_for_sleepers()
        assert not await pool.remove(server.url)
        removing = asyncio.create_task(pool.remove(server.url, wait_s=60))
        clock.advance(5)
        assert await removing
        assert (pool.servers, (await running).finish_reason) == ((), "stop")


async def test_a_watched_server_is_detected_as_dead_and_alive_again() -> None:
    clock = FakeClock()
    async with TimedServer(BOOK, weight_version="5") as server:
        url = server.url
        async with pool_on(url, clock=clock) as pool, watching(pool, clock=clock):
            await wait_for_state(pool, clock, lambda state: state.weight_version == "5")
    async with pool_on(url, clock=clock) as pool, watching(pool, clock=clock):
        await wait_for_state(pool, clock, lambda state: state.failures == 1)
        async with TimedServer(BOOK, port=int(url.rpartition(":")[2])):
            await wait_for_state(pool, clock, lambda state: state.failures == 0)


async def wait_for_state(pool: ModelPool, clock: FakeClock, holds: Any) -> None:
    """Advance the clock of the health checks until the server's state satisfies `holds`."""
    while not holds(pool.servers[0]):
        await clock.wait_for_sleepers()
        clock.advance(1.0)
        for _ in range(20):
            await asyncio.sleep(0)


def test_an_unreachable_server_is_checked_less_and_less_often() -> None:
    assert [due(ServerState("a", failures=n)) for n in (0, 1, 2, 3, 10)] == [15, 1, 2, 4, 30]


async def test_time_at_a_closed_gate_is_not_active_time() -> None:
    clock = FakeClock()
    gate, held = PauseGate(clock), HeldTime()
    passed = asyncio.Event()

    async def wait() -> bool:
        with held.counting(gate.closed_s):
            async with ActiveTimeout(clock, 10.0, held.seconds) as deadline:
                await passed.wait()
        return deadline.expired()

    task = asyncio.create_task(wait())
    await clock.wait_for_sleepers()
    clock.advance(6)
    gate.close()
    clock.advance(100)
    await asyncio.sleep(0)
    assert not task.done()
    gate.open()
    await clock.wait_for_sleepers()
    assert held.seconds() == 100
    clock.advance(3)
    await asyncio.sleep(0)
    assert not task.done()
    clock.advance(1)
    with pytest.raises(TimeoutError):
        await task
