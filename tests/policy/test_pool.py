"""The pool over real servers that come, fail and go."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prorl_envs.errors import InputError, ModelError
from prorl_envs.policy.link import ClientLimits
from prorl_envs.policy.pool import ModelPool
from prorl_envs.policy.protocol import ProtocolError, ServerUnavailable
from prorl_envs.policy.types import Sampling
from prorl_envs.policy.vllm import VllmClient
from prorl_envs.testing.scripted import Mix
from prorl_envs.testing.server import ScriptedServer
from tests.policy.listing import BOOK, PROMPT, RENDERER

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def two_servers(first: str, second: str) -> AsyncIterator[tuple[ScriptedServer, ScriptedServer]]:
    """Two scripted servers with a mix each."""
    async with (
        ScriptedServer(BOOK, mix=Mix.parse(first)) as one,
        ScriptedServer(BOOK, mix=Mix.parse(second)) as two,
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


async def test_sessions_are_spread_and_stay() -> None:
    async with two_servers("solve", "solve") as (one, two), pool_of(one.url, two.url) as pool:
        for _ in range(3):
            answers = await asyncio.gather(
                *(pool.generate(PROMPT, Sampling(), session=str(number)) for number in range(8))
            )
            assert Counter(answer.server for answer in answers) == {one.url: 4, two.url: 4}
            assert [answer.server for answer in answers] == [one.url, two.url] * 4
        assert [server.in_flight for server in pool.servers] == [0, 0]


async def test_a_session_moves_when_its_server_dies() -> None:
    async with ScriptedServer(BOOK) as alive:
        async with ScriptedServer(BOOK) as dying, pool_of(dying.url, alive.url) as pool:
            assert (await pool.generate(PROMPT, Sampling(), session="s")).server == dying.url
        async with pool_of(dying.url, alive.url) as pool:
            assert (await pool.generate(PROMPT, Sampling(), session="s")).server == alive.url
            assert [server.failures for server in pool.servers] == [1, 0]
            assert (await pool.generate(PROMPT, Sampling(), session="s")).server == alive.url


async def test_with_every_server_failing_the_last_error_is_told() -> None:
    async with two_servers("error500", "disconnect") as (one, two), pool_of(one.url, two.url) as pool:
        with pytest.raises(ServerUnavailable, match="broke the connection"):
            await pool.generate(PROMPT, Sampling(), session="s")
        assert [server.in_flight for server in pool.servers] == [0, 0]


async def test_a_wrong_answer_is_not_hidden_by_asking_elsewhere() -> None:
    async with two_servers("short_logprobs", "solve") as (one, two), pool_of(one.url, two.url) as pool:
        with pytest.raises(ProtocolError):
            await pool.generate(PROMPT, Sampling(), session="s")


async def test_servers_come_and_go_while_work_is_in_flight() -> None:
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


async def test_no_server_is_an_error_with_a_remedy() -> None:
    async with pool_of() as pool:
        with pytest.raises(ModelError, match="no model server"):
            await pool.generate(PROMPT, Sampling(), session="s")
        with pytest.raises(InputError):
            pool.add("nonsense")


async def test_a_closed_pool_is_empty() -> None:
    async with ScriptedServer(BOOK) as server, pool_of(server.url) as pool:
        await pool.generate(PROMPT, Sampling(), session="s")
        await pool.aclose()
        with pytest.raises(ModelError):
            await pool.generate(PROMPT, Sampling(), session="s")
