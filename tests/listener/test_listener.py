"""The HTTP listener with clients that keep connections open, on real sockets."""

import asyncio
import logging
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from prorl_envs.listener.connection import HEAD_BYTES, ConnectionCounts, ConnectionLimits
from prorl_envs.listener.listener import HttpListener

pytestmark = pytest.mark.anyio

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
#: Name of the logger under test.
LOG = "prorl_envs.listener.listener"


class App:
    """Application that answers with the length of the body; it answers `/held` when `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.held = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/early":
            await PlainTextResponse("no", 401)(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        if scope["path"] == "/held":
            self.held.set()
            await self.release.wait()
        await PlainTextResponse(str(len(body)))(scope, receive, send)


@asynccontextmanager
async def listening(
    app: ASGIApp | None = None, **limits: float
) -> AsyncIterator[tuple[HttpListener, ConnectionCounts]]:
    counts = ConnectionCounts()
    bounds = ConnectionLimits(**{"head_s": 30.0, "body_s": 30.0, "keep_alive_s": 30.0, **limits})  # type: ignore[arg-type]
    listener = HttpListener(app or App(), socket.create_server(("127.0.0.1", 0)), bounds, counts=counts)
    try:
        yield listener, counts
    finally:
        await listener.aclose()


class Client:
    """Client with a raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, listener: HttpListener) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", listener.port))

    async def get(self, data: bytes = GET) -> int:
        """Return the status of one request."""
        self.writer.write(data)
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 30)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await self.reader.readexactly(length)
        return int(head.split()[1])

    async def end(self) -> bytes:
        """Return all bytes until the server closes the connection."""
        said = b""
        try:
            async with asyncio.timeout(30):
                while data := await self.reader.read(65536):
                    said += data
        except ConnectionError:
            pass
        return said


@pytest.fixture
async def clients() -> AsyncIterator[list[Client]]:
    """Connections that are aborted at the end of the test."""
    opened: list[Client] = []
    yield opened
    for client in opened:
        client.writer.transport.abort()


async def opened(listener: HttpListener, clients: list[Client], count: int) -> list[Client]:
    """Open connections that send an incomplete head."""
    found = [await Client.connect(listener) for _ in range(count)]
    clients += found
    for client in found:
        client.writer.write(b"GET / HTTP/1.1\r\nhost: ")
        await client.writer.drain()
    return found


async def test_half_open_requests_do_not_block_other_clients(clients: list[Client]) -> None:
    async with listening(connections=8) as (listener, counts):
        half = await opened(listener, clients, 40)
        for _ in range(3):
            late = await Client.connect(listener)
            clients.append(late)
            assert await late.get() == 200
        assert await half[0].end() == b"", "the one that has waited longest goes first"
        assert counts.open <= 8 == counts.limit
        assert counts.closed["evicted"] >= 32


async def test_an_endless_head_is_disconnected(clients: list[Client]) -> None:
    async with listening(head_s=0.2) as (listener, counts):
        [half] = await opened(listener, clients, 1)
        silent = await Client.connect(listener)
        clients.append(silent)
        assert await half.end() == await silent.end() == b""
        assert (counts.closed["head_timeout"], counts.open) == (2, 0)


async def test_later_heads_have_the_same_time_limit_as_the_first(clients: list[Client]) -> None:
    async with listening(head_s=0.2) as (listener, counts):
        client = await Client.connect(listener)
        clients.append(client)
        assert await client.get() == 200
        client.writer.write(b"G")
        assert await client.end() == b""
        assert counts.closed["head_timeout"] == 1


async def test_a_connection_may_idle_between_requests_for_a_while(clients: list[Client]) -> None:
    async with listening(head_s=0.1, keep_alive_s=30) as (listener, _), listening(keep_alive_s=0.2) as other:
        patient, hurried = await Client.connect(listener), await Client.connect(other[0])
        clients += [patient, hurried]
        assert await patient.get() == await hurried.get() == 200
        assert await hurried.end() == b""
        assert await patient.get() == 200, "which was longer than a head may take"
        assert not other[1].closed, "idling is no fault"


async def test_a_body_sent_byte_by_byte_is_disconnected(clients: list[Client]) -> None:
    async with listening(body_s=0.3) as (listener, counts):
        client = await Client.connect(listener)
        clients.append(client)
        client.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        ended = asyncio.create_task(client.end())
        while not ended.done():
            client.writer.write(b"x")
            await asyncio.wait({ended}, timeout=0.02)
        assert counts.closed["body_timeout"] == 1


async def test_the_body_of_a_request_that_was_answered_early_does_not_hold_the_connection(
    clients: list[Client],
) -> None:
    """An answer may be sent before the body is read, for example if the token is missing."""
    async with listening(head_s=0.2) as (listener, counts):
        client = await Client.connect(listener)
        clients.append(client)
        client.writer.write(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        said = await client.end()
        assert b" 401 " in said
        assert counts.closed["head_timeout"] == 1


async def test_a_slow_service_is_not_counted_as_a_slow_client(clients: list[Client]) -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await started.wait()
        await App()(scope, receive, send)

    started = asyncio.Event()
    async with listening(slow, body_s=2.0) as (listener, counts):
        client = await Client.connect(listener)
        clients.append(client)
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n"
        asking = asyncio.create_task(client.get(head + b"x" * 200_000))
        await asyncio.wait({asking}, timeout=1.5)
        started.set()
        await asyncio.wait({asking}, timeout=1.0)  # of the client's own time
        client.writer.write(b"x" * 100_000)
        assert await asking == 200
        assert not counts.closed


async def test_the_time_of_a_body_goes_on_when_the_service_reads(clients: list[Client]) -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.5)
        await App()(scope, receive, send)

    async with listening(slow, body_s=0.2) as (listener, counts):
        client = await Client.connect(listener)
        clients.append(client)
        client.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 200_000)
        await client.end()
        assert counts.closed["body_timeout"] == 1


async def test_an_excess_connection_is_answered_503_if_all_others_are_busy(clients: list[Client]) -> None:
    app = App()
    async with listening(app, connections=2) as (listener, counts):
        busy = [await Client.connect(listener) for _ in range(2)]
        clients += busy
        asking = [asyncio.create_task(one.get(GET.replace(b"/ ", b"/held "))) for one in busy]
        await asyncio.wait_for(app.held.wait(), 30)
        while listener.waiting:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0)
        late = await Client.connect(listener)
        clients.append(late)
        assert b" 503 " in await late.end()
        app.release.set()
        assert [await one for one in asking] == [200, 200]
        assert counts.closed["refused"] == 1


async def test_an_excess_connection_waits_if_excess_is_not_refused(clients: list[Client]) -> None:
    app = App()
    async with listening(app, connections=1, refuse=False) as (listener, _):
        busy = await Client.connect(listener)
        first = asyncio.create_task(busy.get(GET.replace(b"/ ", b"/held ")))
        await asyncio.wait_for(app.held.wait(), 30)
        late = await Client.connect(listener)
        clients += [busy, late]
        second = asyncio.create_task(late.get())
        app.release.set()
        assert (await first, await second) == (200, 200)


@pytest.mark.parametrize(
    "endless",
    [
        b"x: " + b"y" * HEAD_BYTES,  # in the trailers
        b"1;" + b"e" * HEAD_BYTES,  # an extension of a chunk
    ],
)
async def test_the_size_of_trailers_and_extensions_is_bounded(clients: list[Client], endless: bytes) -> None:
    start = b"0\r\n" if endless.startswith(b"x") else b"1\r\nx\r\n"
    async with listening() as (listener, counts):
        client = await Client.connect(listener)
        clients.append(client)
        client.writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + start)
        ended = asyncio.create_task(client.end())
        while not ended.done():
            client.writer.write(endless)
            await asyncio.wait({ended}, timeout=0.02)
        assert counts.closed["invalid"] == 1


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Make it impossible to open a file descriptor within the block."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = socket.socket()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), limits[1]))
        lowest.close()
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        lowest.close()


async def test_without_descriptors_the_listener_warns_once_and_continues(
    clients: list[Client], caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as (listener, counts):
        with caplog.at_level(logging.WARNING, logger=LOG):
            waiting = [socket.socket() for _ in range(3)]
            for one in waiting:
                one.setblocking(False)
            with no_descriptors_left():
                for one in waiting:
                    one.connect_ex(("127.0.0.1", listener.port))
                while counts.closed["descriptors"] < 3:  # noqa: ASYNC110 - no event for it
                    await asyncio.sleep(0.01)
            assert [record.levelname for record in caplog.records] == ["WARNING"], caplog.text
            assert "descriptors" in caplog.text and "Traceback" not in caplog.text
        for one in waiting:
            reader, writer = await asyncio.open_connection(sock=one)
            clients.append(Client(reader, writer))
            assert await clients[-1].get() == 200


async def test_a_thousand_errors_are_one_line_of_the_log(
    clients: list[Client], caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(connections=16) as (listener, counts):
        with caplog.at_level(logging.WARNING):
            for _ in range(100):
                client = await Client.connect(listener)
                clients.append(client)
                client.writer.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
                assert b" 400 " in await client.end()
        assert counts.closed["invalid"] == 100
        assert len(caplog.records) == 1, caplog.text


async def test_draining_answers_and_then_disconnects(clients: list[Client]) -> None:
    app = App()
    async with listening(app) as (listener, counts):
        busy, idle = await Client.connect(listener), await Client.connect(listener)
        clients += [busy, idle]
        assert await idle.get() == 200
        asking = asyncio.create_task(busy.get(GET.replace(b"/ ", b"/held ")))
        await asyncio.wait_for(app.held.wait(), 30)
        draining = asyncio.create_task(listener.drain(30))
        assert await idle.end() == b""
        app.release.set()
        assert await asking == 200
        await draining
        assert counts.open == 0
