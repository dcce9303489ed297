"""The SGLang client with the scripted server's SGLang face, over real HTTP."""

import asyncio
from functools import partial
from typing import Any

import pytest

from prorl_envs.model.answer_checks import ServerUnavailable
from prorl_envs.model.servers.sglang import SglangClient
from prorl_envs.model.types import Sampling, VersionSpan
from tests.model.listing import BOOK, PROMPT, RENDERER
from tests.model.listing import talking_to as talking
from tests.support.clock import FakeClock
from tests.support.scripted_servers import scripted_server
from tests.support.timed_server import TimedServer

pytestmark = pytest.mark.anyio


def server(**options: Any) -> TimedServer:
    return scripted_server("sglang", BOOK, **options)


talking_to = partial(talking, SglangClient)


async def test_ids_are_sent_and_returned_with_logprobs() -> None:
    async with server() as sglang, talking_to(sglang.url) as client:
        answer = await client.generate(PROMPT, Sampling(), session="s")
        assert [call.arguments for call in RENDERER.parse(answer.ids).tool_calls] == [{"command": "ls"}]
        assert len(answer.logprobs) == len(answer.ids)
        assert answer.finish_reason == "stop"
        assert answer.ids[-1] in RENDERER.stop_ids
        assert answer.weight_version == "scripted-0"
        assert (answer.version_spans, answer.cached_tokens) == ((), 0)
        again = await client.generate([*PROMPT, *answer.ids], Sampling(), session="s")
        assert again.cached_tokens == len(PROMPT) + len(answer.ids)
        assert sglang.counts.violations == 0


async def test_cancelling_aborts_the_request_on_the_server() -> None:
    async with server(latency_s=3600.0) as sglang, talking_to(sglang.url) as client:
        task = asyncio.ensure_future(client.generate(PROMPT, Sampling(), session="s"))
        await sglang.until(lambda counts: counts.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sglang.until(lambda counts: counts.told_to_abort == 1 and counts.running == 0)
        assert sglang.counts.sampled_tokens == 0


async def test_an_aborted_answer_keeps_its_sampled_tokens() -> None:
    clock = FakeClock()
    async with server(tokens_per_s=1.0, clock=clock) as sglang, talking_to(sglang.url) as client:
        task = asyncio.ensure_future(client.generate(PROMPT, Sampling(), session="s"))
        await clock.wait_for_sleepers()
        clock.advance(4.5)
        assert await client.pause("abort")
        answer = await task
        assert (len(answer.ids), len(answer.logprobs), answer.finish_reason) == (4, 4, "abort")


async def test_frozen_requests_continue_with_the_new_weights() -> None:
    clock = FakeClock()
    async with server(tokens_per_s=1.0, clock=clock) as sglang, talking_to(sglang.url) as client:
        task = asyncio.ensure_future(client.generate(PROMPT, Sampling(), session="s"))
        await clock.wait_for_sleepers()
        clock.advance(4.5)
        assert await client.pause("keep")
        await sglang.until(lambda counts: counts.running == 1)
        assert sglang.engine.pauses == ["retract"]
        assert await client.resume("v2")
        await clock.wait_for_sleepers()
        clock.advance(1000.0)
        answer = await task
        assert answer.finish_reason == "stop"
        assert answer.weight_version == "scripted-0"
        assert answer.version_spans == (
            VersionSpan(version="scripted-0", start=0, end=4),
            VersionSpan(version="v2", start=4, end=len(answer.ids)),
        )


async def test_a_server_without_the_routes_is_reported() -> None:
    async with server(steerable=False) as sglang, talking_to(sglang.url) as client:
        assert not await client.pause("abort")
        assert not await client.resume("v2")


async def test_a_probe_returns_model_and_weight_version() -> None:
    async with server(weight_version="9") as sglang, talking_to(sglang.url) as client:
        news = await client.look()
        assert (news.model, news.weight_version) == ("scripted", "9")
    async with talking_to(sglang.url) as client:
        with pytest.raises(ServerUnavailable):
            await client.look()
