"""The HTTP client for model servers, over real sockets, with arbitrary bytes from the server."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_envs.errors import InputError
from prorl_envs.model.answer_checks import ProtocolError, Refusal, ServerUnavailable
from prorl_envs.model.http import client as model_client
from prorl_envs.model.http.client import ClientLimits, ModelHttpClient
from tests.support.tls import server_tls

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def short_check_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check connections at short intervals, so that tests with broken connections are fast."""
    monkeypatch.setattr(model_client, "_CHECK_S", 0.02)


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
#: Parts of generated answers.
PIECES = [
    *(OK, CHUNKED, b"HTTP/1.1 ", b"200 OK\r\n", b"content-length: 2\r\n", b"\r\n", b"ok", b"0\r\n", b"\0"),
    b"HTTP/1.1 100 Continue\r\n\r\n",
]

type Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Read one request: its head and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(
        (line[16:] for line in head.split("\r\n") if line.lower().startswith("content-length: ")), "0"
    )
    return head, await reader.readexactly(int(length))


@asynccontextmanager
async def server(talk: Talk, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Run a server that calls `talk` for each connection, then closes it."""
    ended: set[asyncio.Task[None]] = set()

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.add(asyncio.current_task())  # type: ignore[arg-type]
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            await talk(reader, writer)
        writer.close()
        with suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()

    listening = await asyncio.start_server(guarded, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in ended:
            task.cancel()
        if ended:
            await asyncio.wait(ended)


def talk_with(answer: bytes, *, then_close: bool = False) -> Talk:
    """Answer every request with these bytes."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(answer)
            if then_close:
                return

    return talk


@asynccontextmanager
async def client(url: str, **limits: Any) -> AsyncIterator[ModelHttpClient]:
    """A client that makes one attempt for each request."""
    link = ModelHttpClient(url, limits=ClientLimits(attempts=1, **limits))
    yield link
    await link.aclose()


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (OK, b"ok"),
        (CHUNKED + b"1\r\no\r\n1;x=y\r\nk\r\n0\r\na: b\r\n\r\n", b"ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nretry-after: 9\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok"),
        (OK + OK, b"ok"),
    ],
    ids=["length", "chunks", "news first", "close", "old", "two answers"],
)  # fmt: skip
async def test_complete_answers(sent: bytes, body: bytes) -> None:
    """Further bytes are not used as the next answer, because the connection is not reused."""
    talks = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal talks
        talks += 1
        await talk_with(sent)(reader, writer)

    async with server(talk) as url, client(url) as link:
        for _ in range(3):
            assert await link.request("POST", "/x", b"{}") == body
            await asyncio.sleep(0.01)
    reused = sent.startswith((b"HTTP/1.1 100", CHUNKED)) or sent == OK
    assert talks == (1 if reused else 3)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_an_answer_may_end_with_the_connection(version: bytes) -> None:
    talk = talk_with(b"HTTP/%b 200 OK\r\nretry-after: 3\r\n\r\nok" % version, then_close=True)
    async with server(talk) as url, client(url) as link:
        assert await link.request("POST", "/x", b"{}") == b"ok"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-len",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.7\r\n",
        OK + b"\0",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"HTTP/1.1 200 OK\r\na\0b: c\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000,
    ],
    ids=lambda sent: repr(sent[:60]),
)
async def test_incomplete_and_ambiguous_answers_are_refused(sent: bytes) -> None:
    async with server(talk_with(sent, then_close=True)) as url, client(url) as link:
        with pytest.raises(ServerUnavailable, match="broke the connection"):
            await link.request("POST", "/x", b"{}")


async def test_a_malformed_chunk_after_the_head_is_noticed() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + b"1\r\no\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"no chunk")
        await reader.read()

    async with server(talk) as url, client(url) as link:
        with pytest.raises(ServerUnavailable, match="broke the connection: the answer is malformed"):
            await asyncio.wait_for(link.request("POST", "/x", b"{}"), 60)


async def test_a_slow_answer_is_waited_for() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for part in (CHUNKED, b"1\r\no\r\n", b"1\r\nk\r\n", b"0\r\n\r\n"):
            await asyncio.sleep(0.1)
            writer.write(part)

    async with server(talk) as url, client(url) as link:
        assert await link.request("POST", "/x", b"{}") == b"ok"


async def test_an_answer_that_ends_while_the_connection_is_checked_is_complete() -> None:
    class Content:
        """Body of an answer whose end arrives together with the timeout of a read."""

        ended = False

        async def readany(self) -> bytes:
            if not self.ended:
                self.ended = True
                await asyncio.sleep(60)
            return b""

        def is_eof(self) -> bool:
            return self.ended

    response: Any = SimpleNamespace(content=Content(), connection=None)  # released at the end of an answer
    assert await model_client._next_part(response) == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n" + b"x" * 1001,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1001,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001,
    ],
    ids=lambda sent: repr(sent[-10:]),
)
async def test_endless_answers_are_cut_off(sent: bytes) -> None:
    async with server(talk_with(sent)) as url, client(url, max_body_bytes=1000) as link:
        with pytest.raises(ProtocolError, match="more than 1000 bytes"):
            await link.request("POST", "/x", b"{}")


async def test_endless_interim_answers_are_cut_off() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.001)

    async with server(talk) as url, client(url, answer_s=0.2) as link:
        with pytest.raises(ServerUnavailable, match="did not answer within"):
            await link.request("POST", "/x", b"{}")


@settings(max_examples=50)
@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=8), max_size=12))
async def test_reading_arbitrary_bytes_terminates(pieces: list[bytes]) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)

    async with server(talk) as url, client(url, max_body_bytes=8) as link:
        with suppress(ServerUnavailable, ProtocolError):
            assert len(await link.request("POST", "/x", b"{}")) <= 8


async def test_cancelling_closes_the_connection() -> None:
    closed = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        assert await reader.read() == b""
        closed.set()

    async with server(talk) as url, client(url) as link:
        asking = asyncio.create_task(link.request("POST", "/x", b"{}"))
        await asyncio.sleep(0.05)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(closed.wait(), 30)


async def test_a_large_request_that_is_refused_early() -> None:
    """The answer is returned, and the rest of the request does not become part of the next one."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await reader.read()

    async with server(talk) as url, client(url) as link:
        with pytest.raises(Refusal, match="413: no"):
            await link.request("POST", "/x", b"x" * 50_000_000)


async def test_the_content_of_a_request() -> None:
    heads = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            heads.append((await read_request(reader))[0])
            writer.write(OK)

    async with server(talk) as url:
        host = url.removeprefix("http://")
        link = ModelHttpClient(f"http://user:p%40ss@{host}/a%20b/v1/")
        assert await link.request("POST", "/v1/x", b"{}", {"x-session-id": "s"}) == b"ok"
        assert await link.ask("GET", "/v1/models") == b"ok"
        await link.aclose()
    post, get = (
        head.replace("Host:", "host:").replace("Content-L", "content-l").split("\r\n") for head in heads
    )
    assert (post[0], get[0]) == ("POST /a%20b/v1/x HTTP/1.1", "GET /a%20b/v1/models HTTP/1.1")
    shared = {f"host: {host}", "accept-encoding: identity", "authorization: Basic dXNlcjpwQHNz"}
    assert shared <= set(post) and shared <= set(get)
    assert {"content-length: 2", "x-session-id: s"} <= set(post)
    assert not any(line.startswith("content-length") for line in get)


@pytest.mark.parametrize("key", ["a\r\nx: y", "a\n", "größe", "\0"])
def test_a_key_that_could_end_its_header_is_refused(key: str) -> None:
    with pytest.raises(InputError, match="printable"):
        ModelHttpClient("http://127.0.0.1:1", api_key=key)


async def test_an_address_without_a_listener_is_unreachable() -> None:
    for url in ("http://127.0.0.1:1", "http://no-such-host.invalid", f"http://{'a' * 64}.invalid"):
        async with client(url) as link:
            with pytest.raises(ServerUnavailable, match="cannot be reached"):
                await link.request("GET", "/")


async def test_a_host_that_accepts_no_connection_is_unreachable() -> None:
    async with server(talk_with(OK)) as url:  # it does not speak TLS, and sends nothing
        link = ModelHttpClient(url.replace("http:", "https:"), limits=ClientLimits(attempts=1, connect_s=0.1))
        with pytest.raises(ServerUnavailable, match="does not accept connections"):
            await link.request("GET", "/")
        await link.aclose()


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


async def test_a_server_of_a_private_authority_is_verified(authority: trustme.CA, tmp_path: Path) -> None:
    trusted, other = tmp_path / "ca.pem", tmp_path / "other.pem"
    authority.cert_pem.write_to_path(str(trusted))
    trustme.CA().cert_pem.write_to_path(str(other))
    limits = ClientLimits(attempts=1)
    async with server(talk_with(OK), server_tls(authority)) as url:
        link = ModelHttpClient(url, ca_file=trusted, limits=limits)
        assert await link.request("GET", "/") == b"ok"
        await link.aclose()
        link = ModelHttpClient(url.replace("127.0.0.1", "localhost"), ca_file=trusted, limits=limits)
        with pytest.raises(ServerUnavailable, match="certificate is not valid for 'localhost'"):
            await link.request("GET", "/")
        await link.aclose()
        link = ModelHttpClient(url, ca_file=other, limits=limits)
        with pytest.raises(ServerUnavailable, match=r"trusted authority: .* \(model\.ca_file names"):
            await link.request("GET", "/")
        await link.aclose()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is not a file"),
        (b"", "no valid certificates"),
        (b"\0" * 100, "no valid certificates"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "no valid certificates"),
    ],
)
def test_a_ca_file_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        ModelHttpClient("https://127.0.0.1:1", ca_file=path)
    assert str(path) in caught.value.message and "model.ca_file" in caught.value.hint


def test_a_pipe_is_no_ca_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is not a file"):
        ModelHttpClient("https://127.0.0.1:1", ca_file=tmp_path / "pipe")


async def test_a_server_of_no_known_authority_is_refused(authority: trustme.CA) -> None:
    async with server(talk_with(OK), server_tls(authority)) as url, client(url) as link:
        with pytest.raises(ServerUnavailable, match="no certificate of a trusted authority"):
            await link.request("GET", "/")


async def test_a_server_that_closes_idle_connections_causes_no_failure() -> None:
    talks = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal talks
        talks += 1
        await read_request(reader)
        writer.write(OK)

    async with server(talk) as url:
        link = ModelHttpClient(url, limits=ClientLimits(attempts=1))
        for number in range(1, 4):
            assert await link.request("GET", "/") == b"ok"
            assert talks == number
            await asyncio.sleep(0.02)  # the close arrives
        await link.aclose()


async def test_a_long_idle_connection_is_not_used_again() -> None:
    talks = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal talks
        talks += 1
        await talk_with(OK)(reader, writer)

    async with server(talk) as url:
        link = ModelHttpClient(url, limits=ClientLimits(attempts=1, idle_s=0.05))
        for pause_s, expected in ((0.0, 1), (0.0, 1), (0.1, 2)):
            await asyncio.sleep(pause_s)
            await link.request("GET", "/")
            assert talks == expected
        await link.aclose()


async def test_encoded_answers_are_refused() -> None:
    async with server(talk_with(OK.replace(b"OK\r\n", b"OK\r\ncontent-encoding: gzip\r\n"))) as url:
        link = ModelHttpClient(url, limits=ClientLimits(attempts=1))
        with pytest.raises(ProtocolError, match="encoded"):
            await link.request("GET", "/")
        await link.aclose()


async def test_a_redirection_is_not_followed() -> None:
    async with server(
        talk_with(b"HTTP/1.1 302 Found\r\nlocation: http://x/\r\ncontent-length: 0\r\n\r\n")
    ) as url:
        link = ModelHttpClient(url)
        with pytest.raises(Refusal, match="302"):
            await link.request("GET", "/")
        await link.aclose()


async def test_closing_aborts_requests_in_flight() -> None:
    asked = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        asked.set()
        await reader.read()

    async with server(talk) as url:
        link = ModelHttpClient(url, limits=ClientLimits(backoff_s=0))
        asking = asyncio.create_task(link.request("GET", "/"))
        await asked.wait()
        await link.aclose()
        with pytest.raises(ServerUnavailable, match="no longer in use"):
            await asking
