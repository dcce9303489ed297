"""The proxy without a sandbox, on a socket of the host: hostile clients, and changing names."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest

from prorl_envs.sandbox.network.proxy import Gateway, Proxy, ProxyLimits, Resolver

pytestmark = pytest.mark.anyio

DEFAULT = ProxyLimits()


async def loopback(name: str) -> Iterable[str]:
    """Resolver controlled by the owner of the name."""
    if not name.endswith("example.com"):
        raise socket.gaierror(socket.EAI_NONAME, "unknown")
    return ["127.0.0.1"]


@asynccontextmanager
async def proxy(
    *allow: str, limits: ProxyLimits = DEFAULT, resolve: Resolver = loopback
) -> AsyncIterator[tuple[int, Gateway, Proxy]]:
    gateway = Gateway(limits, resolve)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    serving = gateway.serve("test", listener, allow)
    try:
        yield port, gateway, serving
    finally:
        await serving.aclose()
        await gateway.aclose()


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """Echo server: returns its input until the input closes. Yields its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def exchange(port: int, data: bytes, *, end: bool = True) -> bytes:
    """Return the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if end:
            writer.write_eof()
        return await reader.read()
    finally:
        writer.close()


async def test_a_name_that_resolves_to_the_host_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """The owner of an allowed name chooses its address. Only the log names it, and how to allow it."""
    async with echo() as inner, proxy(f"a.example.com:{inner}") as (port, _, _):
        for _ in range(2):
            answer = await exchange(port, f"CONNECT a.example.com:{inner} HTTP/1.1\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 403")
            assert b"not public" in answer and b"127.0.0.1" not in answer
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"leads to 127.0.0.1; allow private:a.example.com:{inner}, or 127.0.0.1:{inner}" in warning


@pytest.mark.parametrize("extra", ["private:a.example.com:{}", "127.0.0.1:{}"])
async def test_what_the_log_advises_is_enough(extra: str) -> None:
    async with echo() as inner, proxy(f"a.example.com:{inner}", extra.format(inner)) as (port, _, _):
        answer = await exchange(port, f"CONNECT a.example.com:{inner} HTTP/1.1\r\n\r\nhello".encode())
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"hello")


#: Runs in its own network namespace, in which 8.8.8.8 is this machine.
_PUBLIC_AND_OWN = """
import asyncio, fcntl, os, socket, struct
from prorl_envs.sandbox.network.proxy import Gateway

SIOCSIFFLAGS, SIOCSIFADDR, UP_AND_RUNNING = 0x8914, 0x8916, 0x41
os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    address = struct.pack("=16sHH4s8x", b"lo", socket.AF_INET, 0, socket.inet_aton("8.8.8.8"))
    fcntl.ioctl(control, SIOCSIFADDR, address)
    fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("=16sH14x", b"lo", UP_AND_RUNNING))

async def look_up(name):
    return ["8.8.8.8"]

async def main():
    gateway = Gateway(resolve=look_up)
    listener = socket.create_server(("8.8.8.8", 0))
    proxy = gateway.serve("test", listener, ["a.example.com"])
    with socket.create_server(("8.8.8.8", 80)):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"CONNECT a.example.com:80 HTTP/1.1\\r\\n\\r\\n")
        print((await reader.readline()).decode())
        writer.close()
    await proxy.aclose()
    await gateway.aclose()

asyncio.run(main())
"""


async def test_a_name_that_resolves_to_a_public_address_of_the_machine_is_refused() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PUBLIC_AND_OWN, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert b" 403 " in output and b"not public" in output, output.decode()


async def test_one_bad_address_among_good_ones_is_refused() -> None:
    async def both(name: str) -> Iterable[str]:
        return ["8.8.8.8", "169.254.169.254"]

    async with proxy("a.example.com", resolve=both) as (port, _, _):
        assert b" 403 " in await exchange(port, b"GET http://a.example.com/ HTTP/1.1\r\n\r\n")


async def test_the_checked_address_is_the_connected_one() -> None:
    """A name is resolved once: a second answer cannot differ."""
    lookups: list[str] = []

    async def changing(name: str) -> Iterable[str]:
        lookups.append(name)
        return ["127.0.0.1"] if len(lookups) == 1 else ["169.254.169.254"]

    async with echo() as inner:
        allow = (f"a.example.com:{inner}", f"127.0.0.1:{inner}")
        async with proxy(*allow, resolve=changing) as (port, _, _):
            head = f"CONNECT A.Example.com:{inner} HTTP/1.1\r\n\r\n".encode()
            assert (await exchange(port, head + b"ping")).endswith(b"\r\n\r\nping")
    assert lookups == ["a.example.com"]


async def test_a_tunnel_carries_much_data_both_ways() -> None:
    data = bytes(range(256)) * 16384
    async with echo() as inner, proxy(f"127.0.0.1:{inner}") as (port, *_):
        answer = await exchange(port, f"CONNECT 127.0.0.1:{inner} HTTP/1.1\r\n\r\n".encode() + data)
    assert answer.partition(b"\r\n\r\n")[2] == data


async def test_only_the_announced_body_is_forwarded() -> None:
    """A second request could be for another host, but the first host would answer it."""
    second = b"GET http://other.example.com/ HTTP/1.1\r\n\r\n"
    async with echo() as inner, proxy(f"127.0.0.1:{inner}", limits=ProxyLimits(idle_s=0.5)) as (port, _, _):
        head = f"POST http://127.0.0.1:{inner}/ HTTP/1.1\r\nContent-Length: 4\r\n\r\n".encode()
        answer = await exchange(port, head + b"body" + second)
    assert answer.endswith(b"\r\n\r\nbody")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00" + bytes(500) + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET http://a.example.com/ HTTP/1.1\r\nX: " + b"x" * 10_000_000, b"431"),
        (b"CONNECT unknown.example.org:443 HTTP/1.1\r\n\r\n", b"502"),
    ],
)
async def test_an_invalid_request_is_answered_and_the_next_is_served(data: bytes, status: bytes) -> None:
    async with echo() as inner, proxy("unknown.example.org", f"127.0.0.1:{inner}") as (port, _, _):
        try:
            assert (await exchange(port, data)).split()[1] == status
        except ConnectionError:
            assert len(data) > 1 << 20  # it was closed while the client still sent
        head = f"CONNECT 127.0.0.1:{inner} HTTP/1.1\r\n\r\n".encode()
        assert (await exchange(port, head + b"ping")).endswith(b"ping")


async def test_silent_and_slow_clients_are_disconnected_and_the_next_is_served() -> None:
    limits = ProxyLimits(connections=100, head_s=0.3)
    async with echo() as inner, proxy(f"127.0.0.1:{inner}", limits=limits) as (port, _, _):
        halves = (b"", b"CONNECT 127", b"GET http://a.example.com/ HTTP/1.1\r\nHost")
        outcomes = await asyncio.gather(
            *(exchange(port, halves[index % 3], end=False) for index in range(400)), return_exceptions=True
        )
        assert all(isinstance(o, OSError) or o.startswith(b"HTTP/1.1 408") for o in outcomes)  # type: ignore[union-attr]
        assert await exchange(port, b"CONNECT 12") == b""
        head = f"CONNECT 127.0.0.1:{inner} HTTP/1.1\r\n\r\n".encode()
        assert (await exchange(port, head + b"ping")).endswith(b"ping")
        assert sum(isinstance(outcome, bytes) for outcome in outcomes) > limits.connections


async def test_an_idle_connection_is_closed() -> None:
    async with echo() as inner, proxy(f"127.0.0.1:{inner}", limits=ProxyLimits(idle_s=0.3)) as (port, _, _):
        answer = await exchange(port, f"CONNECT 127.0.0.1:{inner} HTTP/1.1\r\n\r\n".encode(), end=False)
    assert answer.endswith(b"established\r\n\r\n")


async def test_a_client_that_does_not_read_blocks_its_server() -> None:
    """The proxy's buffer is bounded: the server cannot send more."""
    sent = 0
    stuck = asyncio.Event()

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        try:
            while True:
                writer.write(bytes(65536))
                sent += 65536
                async with asyncio.timeout(0.5):
                    await writer.drain()
        except TimeoutError:
            stuck.set()
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(pour, "127.0.0.1", 0)
    inner = server.sockets[0].getsockname()[1]
    async with server, proxy(f"127.0.0.1:{inner}") as (port, _, _):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(f"CONNECT 127.0.0.1:{inner} HTTP/1.1\r\n\r\n".encode())
            await stuck.wait()
    assert sent < 64 << 20


async def test_hanging_lookups_block_only_their_own_sandbox() -> None:
    release = asyncio.Event()

    async def hanging(name: str) -> Iterable[str]:
        await release.wait()
        return []

    limits = ProxyLimits(lookups=2, connect_s=0.5)
    async with (
        echo() as inner,
        proxy("*.example.com", f"127.0.0.1:{inner}", limits=limits, resolve=hanging) as (port, _, _),
    ):
        asks = (b"CONNECT %d.a.example.com:443 HTTP/1.1\r\n\r\n" % index for index in range(4))
        answers = await asyncio.gather(*(exchange(port, each, end=False) for each in asks))
        assert {answer.split()[1] for answer in answers} == {b"504"}
        head = f"CONNECT 127.0.0.1:{inner} HTTP/1.1\r\n\r\n".encode()
        assert (await exchange(port, head + b"ping")).endswith(b"ping")


async def test_closing_the_proxy_closes_its_connections() -> None:
    async with echo() as inner, proxy(f"127.0.0.1:{inner}") as (port, gateway, serving):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"CONNECT 127.0.0.1:{inner} HTTP/1.1\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        free = gateway.free
        await serving.aclose()
        assert await reader.read() == b""
        writer.close()
        assert gateway.free == free + 1
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        await serving.aclose()


async def test_a_connection_that_was_just_accepted_is_closed_too() -> None:
    """Its task is cancelled before its first step."""
    async with proxy("a.example.com") as (port, _, serving):
        before = asyncio.all_tasks()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(100):
            if asyncio.all_tasks() - before:
                break
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks() - before) == 1
        await serving.aclose()
        assert await reader.read() == b""
        writer.close()
