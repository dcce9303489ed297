"""Bounds of turns in flight on a server: their computation, and a pool with an overloaded server."""

import asyncio
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.routing.balance import ServerState, decide
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.routing.state import Router
from prorl_envs.model.servers.detect import Servers
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.window import AimdWindow
from tests.support.clock import FakeClock
from tests.support.timed_server import TimedServer

RENDERER = builtin_renderer()
BOOK = ScriptBook.from_tapes({"List the files.": [[{"tool": "bash", "arguments": {"command": "ls"}}]]})
PROMPT = RENDERER.prompt([{"role": "user", "content": "List the files."}])


def test_without_refusals_there_is_no_bound() -> None:
    window = AimdWindow()
    for number in range(10_000):
        window.answered(number)
    assert not window.full(10_000)


def test_simultaneous_refusals_count_once() -> None:
    window = AimdWindow()
    for _ in range(50):
        window.complained(40, 0.0)
    assert (window.limit, window.full(29), window.full(30)) == (30.0, False, True)
    window.complained(30, 1.0)
    assert window.limit == 22.5


def test_a_round_of_answers_adds_one() -> None:
    window = AimdWindow(limit=10.0)
    for _ in range(11):
        window.answered(10)
    assert 10.9 < window.limit < 11.2
    for _ in range(100):
        window.answered(3)
    assert window.limit < 11.2, "what was not used is no reason for more"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 100)), max_size=100))
def test_a_window_always_lets_one_through(events: list[tuple[bool, int]]) -> None:
    window = AimdWindow()
    for now, (complains, in_flight) in enumerate(events):
        if complains:
            window.complained(in_flight, float(now))
        else:
            window.answered(in_flight)
        assert window.limit >= 1
        assert not window.full(0)


def test_a_full_server_gets_no_turn_while_another_has_room() -> None:
    servers = [ServerState("a", in_flight=2, window=AimdWindow(limit=2.0)), ServerState("b", in_flight=5)]
    assert decide(servers, pinned="a", now=0.0) == "b"
    router = Router()
    router.add("a")
    for number in range(2):
        router.start(f"s{number}", 0.0)
    assert not router.saturated(0.0)
    router.complained("a", 0.0)
    assert router.saturated(0.0)
    assert not router.saturated(0.0, excluded={"a"}), "nothing to wait for"


@pytest.mark.anyio
async def test_an_overloaded_server_gets_less_at_once() -> None:
    clock = FakeClock()
    servers = Servers.of(RENDERER, limits=ClientLimits(attempts=50), clock=clock)
    async with TimedServer(BOOK, most=4, latency_s=1.0, clock=clock) as server:
        pool = ModelPool(servers.connect, clock=clock)
        pool.add(server.url)
        tasks = [
            asyncio.create_task(pool.generate(PROMPT, Sampling(), session=str(number)))
            for number in range(48)
        ]
        while not all(task.done() for task in tasks):
            clock.advance(1.0)
            await asyncio.sleep(0.001)  # real sockets: the loop must run
        assert all(task.result().finish_reason == "stop" for task in tasks)
        [state] = pool.servers
        assert math.isfinite(state.window.limit) and state.window.limit < 30
        assert (state.in_flight, state.failures) == (0, 0)
        await pool.aclose()


@pytest.mark.anyio
async def test_a_turn_that_waits_for_room_can_be_cancelled() -> None:
    asked: list[str] = []
    go = asyncio.Event()

    class Slow:
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
            asked.append(session)
            await go.wait()
            return Sampled((1,), (0.0,), "stop", "", "http://slow")

        async def aclose(self) -> None: ...

    router = Router()
    pool = ModelPool(lambda url: Slow(), router=router)
    pool.add("http://slow")
    router.servers[0].window.limit = 1.0
    turns = [asyncio.create_task(pool.generate([1], Sampling(), session=name)) for name in "abcd"]
    while not asked:  # noqa: ASYNC110 - the loop must turn
        await asyncio.sleep(0)
    turns[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await turns[1]
    assert asked == ["a"], "the others wait"
    go.set()
    await asyncio.gather(turns[0], turns[2], turns[3])
    assert asked == ["a", "c", "d"], "in their order"
    await pool.aclose()


def test_only_a_fully_used_window_grows() -> None:
    window = AimdWindow(limit=4.0)
    window.answered(2)
    assert window.limit == 4.0
    window.answered(3)
    assert window.limit == 4.25


def test_a_very_large_limit_becomes_unlimited() -> None:
    window = AimdWindow(limit=4096.0 - 1e-9)
    window.answered(5000)
    assert window.limit == math.inf and not window.full(10**9)
