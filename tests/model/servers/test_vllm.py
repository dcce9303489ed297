"""The vLLM client with the scripted server, over real HTTP, with every fault of a server."""

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest
from starlette.types import Receive, Scope, Send

from prorl_envs.errors import InputError
from prorl_envs.model.answer_checks import ProtocolError, ServerUnavailable
from prorl_envs.model.http.client import ClientLimits, base_url
from prorl_envs.model.servers.probe import probe
from prorl_envs.model.servers.vllm import VllmClient
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.http.server import answering
from prorl_envs.testing.scripted_app import ScriptedOptions, ScriptedService
from prorl_envs.testing.server import scripted_app
from tests.model.listing import BOOK, PROMPT, RENDERER
from tests.model.listing import talking_to as talking
from tests.support.clock import FakeClock
from tests.support.timed_server import TimedServer

pytestmark = pytest.mark.anyio


talking_to = partial(talking, VllmClient)


async def test_ids_are_sent_and_returned_with_logprobs() -> None:
    async with TimedServer(BOOK) as server, talking_to(server.url + "/v1/") as client:
        answer = await client.generate(PROMPT, Sampling(), session="s")
        assert [call.arguments for call in RENDERER.parse(answer.ids).tool_calls] == [{"command": "ls"}]
        assert len(answer.logprobs) == len(answer.ids)
        assert all(value <= 0 for value in answer.logprobs)
        assert answer.finish_reason == "stop"
        assert answer.ids[-1] in RENDERER.stop_ids
        assert answer.weight_version == "scripted-0"
        assert answer.server == server.url
        again = await client.generate(PROMPT, Sampling(), session="s")
        assert replace(again, cached_tokens=0) == answer
        assert again.cached_tokens == len(PROMPT)
        assert server.counts.repeats == 1


async def test_an_overloaded_server_is_retried() -> None:
    async with (
        TimedServer(BOOK, mix="flaky") as server,
        talking_to(server.url) as client,
    ):
        answer = await client.generate(PROMPT, Sampling(), session="s")
        assert RENDERER.parse(answer.ids).tool_calls
        assert server.counts.requests == 2


class Pauses(FakeClock):
    """Clock that records sleeping times and returns without delay."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)


async def test_backoff_grows_and_is_jittered() -> None:
    clock = Pauses()
    limits = ClientLimits(attempts=4, backoff_s=1.0, max_backoff_s=3.0)
    async with (
        TimedServer(BOOK, mix="error500") as server,
        talking_to(server.url, limits=limits, clock=clock, jitter=lambda: 0.5) as client,
    ):
        with pytest.raises(ServerUnavailable):
            await client.generate(PROMPT, Sampling(), session="s")
    assert clock.slept == [1.0, 2.0, 3.0]


async def test_a_silent_server_times_out_by_the_clock() -> None:
    clock = FakeClock()
    async with (
        TimedServer(BOOK, mix="hang") as server,
        talking_to(server.url, clock=clock, model="scripted") as client,
    ):
        task = asyncio.ensure_future(client.generate(PROMPT, Sampling(), session="s"))
        await server.until(lambda counts: counts.running == 1)
        clock.advance(ClientLimits().answer_s)
        with pytest.raises(ServerUnavailable, match="did not answer within 1800 s"):
            await task
        await server.until(lambda counts: counts.aborted == 1 and counts.running == 0)


async def test_cancelling_stops_the_generation_on_the_server() -> None:
    async with (
        TimedServer(BOOK, latency_s=3600.0) as server,
        talking_to(server.url) as client,
    ):
        task = asyncio.ensure_future(client.generate(PROMPT, Sampling(), session="s"))
        await server.until(lambda counts: counts.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.until(lambda counts: counts.aborted == 1 and counts.running == 0)
        assert server.counts.sampled_tokens == 0
        assert not server.exchanges


async def test_a_server_can_stop_while_it_is_hanging() -> None:
    async with TimedServer(BOOK, mix="hang") as server:
        client = VllmClient(server.url, stop_ids=(), limits=ClientLimits(attempts=1))
        task = asyncio.ensure_future(client.generate(PROMPT, Sampling(), session="s"))
        await server.until(lambda counts: counts.running == 1)
    with pytest.raises(ServerUnavailable):
        await task
    await client.aclose()


async def test_an_absent_server_is_unavailable() -> None:
    async with TimedServer(BOOK) as server:
        url = server.url
    async with talking_to(url, limits=ClientLimits(attempts=2, backoff_s=0)) as client:
        with pytest.raises(ServerUnavailable, match="cannot be reached"):
            await client.generate(PROMPT, Sampling(), session="s")


async def test_a_refused_request_names_the_reason_and_is_not_repeated() -> None:
    async with TimedServer(BOOK, max_model_len=100) as server, talking_to(server.url) as client:
        with pytest.raises(ProtocolError, match="maximum context length") as caught:
            await client.generate(PROMPT, Sampling(max_tokens=100), session="s")
        assert "max_tokens" in caught.value.hint
        assert server.counts.requests == 1


async def test_an_answer_too_large_is_cut_off() -> None:
    limits = ClientLimits(max_body_bytes=64)
    async with TimedServer(BOOK) as server, talking_to(server.url, limits=limits, model="m") as client:
        with pytest.raises(ProtocolError, match="more than 64 bytes"):
            await client.generate(PROMPT, Sampling(), session="s")


async def test_any_session_name_makes_a_valid_header() -> None:
    async with TimedServer(BOOK) as server, talking_to(server.url) as client:
        for session in ("a/b:c", "größe\r\nx: y", " ", "\u2028"):
            await client.generate(PROMPT, Sampling(), session=session)
        assert server.counts.sessions == 4


async def test_many_concurrent_sessions() -> None:
    async with TimedServer(BOOK, noncanonical=0.5) as server, talking_to(server.url) as client:
        answers = await asyncio.gather(
            *(client.generate(PROMPT, Sampling(), session=str(number)) for number in range(64))
        )
        texts = {RENDERER.decode(answer.ids) for answer in answers}
        assert len(texts) == 1
        assert len({answer.ids for answer in answers}) > 32


async def test_connections_are_reused_and_bounded() -> None:
    app = scripted_app(ScriptedService(RENDERER, BOOK, ScriptedOptions()))
    seen = set()

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        seen.add(scope["client"])
        await app(scope, receive, send)

    limits = ClientLimits(max_connections=3)
    async with answering(noting) as url, talking_to(url, limits=limits) as client:
        for _ in range(3):
            await asyncio.gather(
                *(client.generate(PROMPT, Sampling(), session=str(number)) for number in range(8))
            )
    assert len(seen) <= 4  # one of them asked for the route, before


async def test_a_closed_client_raises() -> None:
    async with TimedServer(BOOK) as server, talking_to(server.url) as client:
        await client.generate(PROMPT, Sampling(), session="s")
        await client.aclose()
        with pytest.raises(ServerUnavailable, match="no longer in use"):
            await client.generate(PROMPT, Sampling(), session="s")


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/v1", "http://h:8000"),
        ("https://h/a/v1/", "https://h/a"),
    ],
)
def test_base_url(given: str, base: str) -> None:
    assert base_url(given) == base


@pytest.mark.parametrize("url", ["", "h:8000", "ftp://h", "http://", "http://h:port", "http://h:99999"])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(InputError):
        base_url(url)


async def test_probe_accepts_a_suitable_server() -> None:
    async with TimedServer(BOOK) as server:
        report = await probe(server.url)
    assert report.ok
    assert report.model == "scripted"
    assert report.weight_version == "scripted-0"


async def test_probe_names_missing_features() -> None:
    async with TimedServer(BOOK, text_only=True) as server:
        report = await probe(server.url)
    assert not report.ok
    assert "token ids" in report.problem
    assert "return_token_ids" in report.hint


async def test_probe_names_an_address_without_a_server() -> None:
    async with TimedServer(BOOK) as server:
        url = server.url
    report = await probe(url)
    assert "cannot be reached" in report.problem
    assert json.dumps(report.hint)
