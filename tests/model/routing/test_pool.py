"""The pool over real servers that are added, fail and are removed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from prorl_envs.clock import Clock
from prorl_envs.errors import InputError, ModelError
from prorl_envs.model.answer_checks import ProtocolError, RouteRefused, ServerUnavailable
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.detect import Servers
from prorl_envs.model.servers.vllm import VllmClient
from prorl_envs.model.types import Sampling, ServerHealth
from prorl_envs.rollout.http.server import answering
from prorl_envs.testing.server import scripted_app
from tests.model.listing import BOOK, PROMPT, RENDERER
from tests.support.clock import FakeClock
from tests.support.timed_server import TimedServer

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def two_servers(first: str, second: str) -> AsyncIterator[tuple[TimedServer, TimedServer]]:
    """Run two scripted servers with a mix each."""
    async with (
        TimedServer(BOOK, mix=first) as one,
        TimedServer(BOOK, mix=second) as two,
    ):
        yield one, two


@asynccontextmanager
async def pool_of(*urls: str) -> AsyncIterator[ModelPool]:
    limits = ClientLimits(attempts=1)
    pool = ModelPool(lambda url: VllmClient(url, stop_ids=RENDERER.stop_ids, limits=limits))
    for url in urls:
        pool.add(url)
    try:
        yield pool
    finally:
        await pool.aclose()


async def test_sessions_are_distributed_and_stay_on_their_server() -> None:
    async with two_servers("solve", "solve") as (one, two), pool_of(one.url, two.url) as pool:
        for _ in range(3):
            answers = await asyncio.gather(
                *(pool.generate(PROMPT, Sampling(), session=str(number)) for number in range(8))
            )
            assert Counter(answer.server for answer in answers) == {one.url: 4, two.url: 4}
            assert [answer.server for answer in answers] == [one.url, two.url] * 4
        assert [server.in_flight for server in pool.servers] == [0, 0]


async def test_a_session_moves_when_its_server_dies() -> None:
    async with TimedServer(BOOK) as alive:
        async with TimedServer(BOOK) as dying, pool_of(dying.url, alive.url) as pool:
            assert (await pool.generate(PROMPT, Sampling(), session="s")).server == dying.url
        async with pool_of(dying.url, alive.url) as pool:
            assert (await pool.generate(PROMPT, Sampling(), session="s")).server == alive.url
            assert [server.failures for server in pool.servers] == [1, 0]
            assert (await pool.generate(PROMPT, Sampling(), session="s")).server == alive.url


async def test_if_every_server_fails_the_last_error_is_raised() -> None:
    async with two_servers("error500", "disconnect") as (one, two), pool_of(one.url, two.url) as pool:
        with pytest.raises(ServerUnavailable, match="broke the connection"):
            await pool.generate(PROMPT, Sampling(), session="s")
        assert [server.in_flight for server in pool.servers] == [0, 0]


async def test_an_invalid_answer_is_not_retried_elsewhere() -> None:
    async with two_servers("short_logprobs", "solve") as (one, two), pool_of(one.url, two.url) as pool:
        with pytest.raises(ProtocolError):
            await pool.generate(PROMPT, Sampling(), session="s")


async def test_servers_are_added_and_removed_while_turns_are_in_flight() -> None:
    async with two_servers("hang", "solve") as (slow, other), pool_of(slow.url) as pool:
        task = asyncio.ensure_future(pool.generate(PROMPT, Sampling(), session="s"))
        await slow.until(lambda counts: counts.running == 1)
        assert pool.add(other.url + "/v1") == other.url
        await pool.remove(slow.url)
        assert [server.url for server in pool.servers] == [slow.url, other.url], "it is still working"
        assert (await pool.generate(PROMPT, Sampling(), session="t")).server == other.url
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [server.url for server in pool.servers] == [other.url]
        await pool.clear()
        assert pool.servers == ()


async def test_a_pool_without_servers_raises_an_error_with_a_remedy() -> None:
    async with pool_of() as pool:
        with pytest.raises(ModelError, match="no model server"):
            await pool.generate(PROMPT, Sampling(), session="s")
        with pytest.raises(InputError):
            pool.add("nonsense")


async def test_a_closed_pool_is_empty() -> None:
    async with TimedServer(BOOK) as server, pool_of(server.url) as pool:
        await pool.generate(PROMPT, Sampling(), session="s")
        await pool.aclose()
        with pytest.raises(ModelError):
            await pool.generate(PROMPT, Sampling(), session="s")


def refusing(status: int, *, models: bool = True) -> ASGIApp:
    """Server that lists its model and refuses all other requests.

    Args:
        status: of the refusal.
        models: whether it lists its model.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/models" and models:
            response = JSONResponse({"data": [{"id": "m", "owned_by": "vllm"}]})
        else:
            response = JSONResponse({"error": {"message": "no such route"}}, status)
        await response(scope, receive, send)

    return app


@asynccontextmanager
async def automatic_pool(*urls: str, clock: Clock | None = None) -> AsyncIterator[ModelPool]:
    """Yield a pool that detects the protocol of its servers."""
    pool = ModelPool(Servers.of(RENDERER, limits=ClientLimits(attempts=1)).connect, clock=clock)
    for url in urls:
        pool.add(url)
    try:
        yield pool
    finally:
        await pool.aclose()


def health_of(pool: ModelPool) -> list[ServerHealth]:
    return [server.health for server in pool.servers]


@pytest.mark.parametrize(
    ("status", "models"), [(403, True), (404, True), (401, False), (403, False), (404, False), (302, True)]
)
async def test_turns_move_away_from_a_server_that_refuses_its_routes(status: int, models: bool) -> None:
    async with (
        TimedServer(BOOK) as good,
        answering(refusing(status, models=models)) as bad,
        automatic_pool(bad, good.url, clock=FakeClock()) as pool,
    ):
        for session in range(6):
            assert (await pool.generate(PROMPT, Sampling(), session=f"{session}")).server == good.url
        assert health_of(pool) == [ServerHealth.FAILING, ServerHealth.HEALTHY]
        assert pool.servers[0].turns == 1, "it is left alone for a while"
        assert bad in pool.servers[0].problem


async def test_a_request_refused_for_its_content_is_not_the_servers_fault() -> None:
    async with answering(refusing(400)) as strict, automatic_pool(strict) as pool:
        await pool.check(strict)
        with pytest.raises(ProtocolError) as caught:
            await pool.generate(PROMPT, Sampling(), session="s")
        assert not isinstance(caught.value, RouteRefused)
        assert health_of(pool) == [ServerHealth.HEALTHY]


async def test_a_health_check_does_not_clear_a_refused_turn() -> None:
    clock = FakeClock()
    async with AsyncExitStack() as stack:
        async with answering(refusing(403)) as bad:
            pool = await stack.enter_async_context(automatic_pool(bad, clock=clock))
            with pytest.raises(RouteRefused):
                await pool.generate(PROMPT, Sampling(), session="s")
            assert await pool.check(bad), "the route of the health check answers"
            assert health_of(pool) == [ServerHealth.FAILING]
        await stack.enter_async_context(TimedServer(BOOK, port=int(bad.rpartition(":")[2])))
        await pool.check(bad)  # may find the previous connection closed
        assert await pool.check(bad)
        assert health_of(pool) == [ServerHealth.FAILING], "no turn was answered yet"
        await pool.generate(PROMPT, Sampling(), session="s")
        assert health_of(pool) == [ServerHealth.HEALTHY]


async def test_a_server_without_a_health_check_is_healthy_once_it_answers() -> None:
    """Some proxies pass only the sampling routes."""

    async def without_models(scope: Scope, receive: Receive, send: Send) -> None:
        hidden = scope["path"] == "/v1/models" and pool.servers[0].sampled
        await (refusing(404, models=False) if hidden else whole)(scope, receive, send)

    async with TimedServer(BOOK) as server:
        whole = scripted_app(server._service)
        async with answering(without_models) as proxy, automatic_pool(proxy) as pool:
            await pool.generate(PROMPT, Sampling(), session="s")
            assert not await pool.check(proxy)
            assert health_of(pool) == [ServerHealth.HEALTHY]


async def test_a_server_is_unknown_until_its_first_answer() -> None:
    async with TimedServer(BOOK) as server, automatic_pool(server.url, "http://127.0.0.1:9") as pool:
        assert health_of(pool) == [ServerHealth.UNKNOWN] * 2
        assert [await pool.check(one.url) for one in pool.servers] == [True, False]
        assert health_of(pool) == [ServerHealth.HEALTHY, ServerHealth.FAILING]
        assert "cannot be reached" in pool.servers[1].problem or "127.0.0.1:9" in pool.servers[1].problem
