"""Protocol of a server: configured, or detected over real HTTP."""

import asyncio

import pytest

from prorl_envs.errors import InputError, ModelError
from prorl_envs.model.answer_checks import ProtocolError, ServerUnavailable
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.servers.detect import AutoClient, Protocol, Servers, split_protocol
from prorl_envs.model.servers.probe import probe
from prorl_envs.model.types import ControllableServer, Sampling
from tests.model.listing import BOOK, PROMPT, RENDERER
from tests.support.openai_server import scripted_openai
from tests.support.scripted_servers import scripted_server
from tests.support.timed_server import TimedServer

pytestmark = pytest.mark.anyio

LIMITS = ClientLimits(attempts=1)


@pytest.mark.parametrize(
    ("url", "split"),
    [
        ("http://h:1/v1", ("", "http://h:1")),
        ("sglang+http://h:1", ("sglang", "http://h:1")),
        ("llamacpp+http://h:1", ("llamacpp", "http://h:1")),
        ("openai+https://h/v1/", ("openai", "https://h")),
    ],
)
def test_a_url_may_name_its_protocol(url: str, split: tuple[str, str]) -> None:
    assert split_protocol(url) == split


@pytest.mark.parametrize("url", ["telnet+http://h", "sglang+", "+http://h", "sglang+ftp://h", ""])
def test_urls_without_a_known_protocol_are_refused(url: str) -> None:
    with pytest.raises(InputError):
        split_protocol(url)


@pytest.mark.parametrize("protocol", ["vllm", "sglang", "llamacpp"])
async def test_the_protocol_is_detected_at_the_first_turn(protocol: str) -> None:
    async with scripted_server(protocol, BOOK) as server:
        client = Servers.of(RENDERER, limits=LIMITS).connect(server.url)
        assert isinstance(client, AutoClient) and client.protocol == ""
        answers = await asyncio.gather(
            *(client.generate(PROMPT, Sampling(), session=str(number)) for number in range(4))
        )
        assert all(answer.finish_reason == "stop" for answer in answers)
        assert client.protocol == protocol
        await client.aclose()


async def test_the_protocol_of_an_unreachable_server_is_detected_later() -> None:
    async with TimedServer(BOOK) as server:
        url = server.url
    client = Servers.of(RENDERER, limits=LIMITS).connect(url)
    turns = [client.generate(PROMPT, Sampling(), session=str(number)) for number in range(3)]
    for outcome in await asyncio.gather(*turns, return_exceptions=True):
        assert isinstance(outcome, ServerUnavailable)
    port = int(url.rpartition(":")[2])
    async with scripted_server("sglang", BOOK, port=port):
        assert (await client.generate(PROMPT, Sampling(), session="s")).ids
    await client.aclose()


async def test_detection_never_falls_back_to_text() -> None:
    async with TimedServer(BOOK, text_only=True) as server:
        client = Servers.of(RENDERER, limits=LIMITS).connect(server.url)
        with pytest.raises(ProtocolError, match="token ids"):
            await client.generate(PROMPT, Sampling(), session="s")
        await client.aclose()


async def test_a_chat_server_accepts_no_ids() -> None:
    client = Servers.of(RENDERER, protocol="openai", model="m").connect("http://127.0.0.1:1")
    assert isinstance(client, ControllableServer)
    assert not await client.pause("abort") and not await client.resume("")
    with pytest.raises(ModelError, match="takes no token ids"):
        await client.generate(PROMPT, Sampling(), session="s")
    await client.aclose()
    with pytest.raises(InputError, match="needs a tokenizer"):
        Servers(protocol="openai").connect("http://127.0.0.1:1")


@pytest.mark.parametrize("protocol", ["auto", "sglang"])
async def test_a_probe_of_sglang(protocol: Protocol) -> None:
    async with scripted_server("sglang", BOOK, weight_version="4") as server:
        report = await probe(server.url, protocol=protocol)
    assert report.ok, report.problem
    assert (report.model, report.weight_version) == ("scripted", "4")


async def test_a_probe_of_a_chat_server() -> None:
    with scripted_openai([]) as url:
        report = await probe(f"openai+{url}", model="nothing")
    assert "no known task" in report.problem, "it was asked as a chat server"
