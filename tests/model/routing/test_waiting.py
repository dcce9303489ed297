"""A pool without a server: turns wait for the first server, and nothing fails."""

import asyncio

import pytest

from prorl_envs.errors import ModelError
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.detect import Servers
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.service.model_servers import router_view
from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.timed_server import TimedServer

pytestmark = pytest.mark.anyio

RENDERER = builtin_renderer()
BOOK = ScriptBook.from_tapes({"List the files.": [[{"tool": "bash", "arguments": {"command": "ls"}}]]})
PROMPT = RENDERER.prompt([{"role": "user", "content": "List the files."}])


async def test_turns_wait_for_the_first_server_that_answers() -> None:
    pool = ModelPool(Servers.of(RENDERER, limits=ClientLimits(attempts=1)).connect, wait=True)
    seen: list[bool] = []

    async def notice() -> None:
        seen.append(pool.paused)

    pool.watch(notice)
    turn = asyncio.create_task(pool.generate(PROMPT, Sampling(), session="s"))
    await asyncio.sleep(0)
    assert pool.waiting and pool.paused and not turn.done()
    view = router_view(pool)
    assert view.waiting and view.paused and view.turns == 0
    async with TimedServer(BOOK) as server:
        pool.add("http://127.0.0.1:9")
        assert not await pool.check("http://127.0.0.1:9")
        assert pool.waiting and not turn.done(), "that one does not answer"
        pool.add(server.url)
        assert pool.waiting
        assert await pool.check(server.url)
        assert (await turn).finish_reason == "stop"
        assert not pool.waiting and seen == [False]
        assert pool.paused_s() > 0, "which no turn's time counts"
        await pool.clear()
        with pytest.raises(ModelError, match="no model server"):
            await pool.generate(PROMPT, Sampling(), session="s")
    await pool.aclose()


async def test_a_server_added_while_weights_change_is_held_too() -> None:
    pool = ModelPool(Servers.of(RENDERER).connect, wait=True)
    await pool.pause("finish")
    await pool.resume("1")
    assert pool.paused, "there is still no server"
    await pool.pause("finish")
    async with TimedServer(BOOK) as server:
        pool.add(server.url)
        await pool.check(server.url)
        assert pool.paused and not pool.waiting
        turn = asyncio.create_task(pool.generate(PROMPT, Sampling(), session="s"))
        await asyncio.sleep(0)
        assert not turn.done()
        await pool.resume("2")
        assert (await turn).weight_version
        await pool.aclose()


async def test_a_turn_that_waits_for_a_server_fails_if_the_pool_closes() -> None:
    pool = ModelPool(Servers.of(RENDERER).connect, wait=True)
    turn = asyncio.create_task(pool.generate(PROMPT, Sampling(), session="s"))
    await asyncio.sleep(0)
    await pool.aclose()
    with pytest.raises(ModelError, match="no model server"):
        await turn
