"""Promises about the two ways out of a sandbox's network: the allowlist's proxy, and loopback services."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prorl_envs.conformance.box import TIMEOUT_S, Probe
from prorl_envs.conformance.promise import NOT_LOCAL, PYTHON, Promises, expect, same
from prorl_envs.conformance.promises.network import CONNECT, no_connection
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.sandbox.base import PROXY_PORT, Network

promises = Promises("network", exempt=NOT_LOCAL)


#: Requests a target from the proxy, and returns the answer of the proxy or of the server behind it.
_ASK_PROXY = f"""
import socket
def ask(first, then=b""):
    with socket.create_connection(("127.0.0.1", {PROXY_PORT}), 20) as s:
        s.sendall(first.encode() + b"\\r\\n\\r\\n" + then)
        data = b""
        while more := s.recv(65536):
            data += more
        return data
"""


@asynccontextmanager
async def _web() -> AsyncIterator[int]:
    """Run a web server on the host's loopback; yield its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nfrom outside")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@promises.add(
    "NET-013",
    "A host on the sandbox's allowlist is reached through the proxy, by request and by tunnel.",
    needs=(PYTHON,),
)
async def listed(world: PromiseContext) -> None:
    async with (
        _web() as port,
        world.fresh(python=True, network=Network(allow=(f"127.0.0.1:{port}",))) as box,
    ):
        await box.nothing_in_python(f"""{_ASK_PROXY}
get = b"GET / HTTP/1.1\\r\\n\\r\\n"
for answer in (ask("GET http://127.0.0.1:{port}/ HTTP/1.1"), ask("CONNECT 127.0.0.1:{port} HTTP/1.1", get)):
    if not answer.endswith(b"from outside"):
        print(answer)
""")


@promises.add(
    "NET-016",
    "Even with an allowlist, the proxy is the only way out, and other sandboxes cannot reach it.",
    needs=(PYTHON,),
)
async def only_way(world: PromiseContext) -> None:
    async with (
        _web() as port,
        world.fresh(python=True, network=Network(allow=(f"127.0.0.1:{port}", "192.0.2.1"))) as box,
    ):
        await box.nothing_in_python(
            f"{CONNECT}\nconnect(socket.AF_INET, ('127.0.0.1', {port}))\n"
            "connect(socket.AF_INET, ('192.0.2.1', 80))"
        )
        await world.python_box.nothing_in_python(
            f"{CONNECT}\nconnect(socket.AF_INET, ('127.0.0.1', {PROXY_PORT}))"
        )


#: Sends a greeting to each port in its arguments, and prints the reply or "refused".
_GREET = """
import socket, sys
for port in sys.argv[1:]:
    try:
        with socket.create_connection(("127.0.0.1", int(port)), 20) as s:
            s.sendall(b"hello from inside")
            print(s.makefile().readline(), end="")
    except ConnectionRefusedError:
        print("refused")
"""


@asynccontextmanager
async def _service(listener: socket.socket) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Serve a sandbox's listener; yield its port and the list of received messages."""
    received: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(100))
        writer.write(b"hello from outside\n")
        writer.close()

    async with await asyncio.start_server(answer, sock=listener):
        yield listener.getsockname()[1], received


async def _greeted(box: Probe, *ports: int) -> list[str]:
    argv = [box.python, "-I", "-c", _GREET, *map(str, ports)]
    done = await box.tools.run(argv, timeout_s=TIMEOUT_S)
    return done.output.decode(errors="replace").splitlines()


@promises.add(
    "NET-017",
    "A service of the host can listen on the sandbox's own loopback, and programs inside can reach it.",
    needs=(PYTHON,),
    exempt={},
)
async def service_inside(world: PromiseContext) -> None:
    async with (
        world.fresh(python=True) as box,
        _service(await box.sandbox.listen_loopback()) as (port, received),
    ):
        same(await _greeted(box, port, port), ["hello from outside"] * 2)
        same(received, [b"hello from inside"] * 2)


@promises.add("NET-018", "Neither other sandboxes nor the host can reach such a service.", needs=(PYTHON,))
async def service_apart(world: PromiseContext) -> None:
    async with (
        world.fresh(python=True) as box,
        world.fresh(python=True) as other,
        _service(await box.sandbox.listen_loopback()) as (port, received),
        _service(await other.sandbox.listen_loopback()) as (second, others_received),
    ):
        same(await _greeted(other, second), ["hello from outside"])
        if port != second:
            same(await _greeted(other, port), ["refused"])
            with socket.socket() as outside:
                expect(outside.connect_ex(("127.0.0.1", port)) != 0, "the host reaches it")
        same((len(received), len(others_received)), (0, 1))


@promises.add("NET-019", "With such a service, nothing else of the host can be reached.", needs=(PYTHON,))
async def service_alone(world: PromiseContext) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with (
            world.fresh(python=True) as box,
            _service(await box.sandbox.listen_loopback()) as (port, _),
        ):
            same(await _greeted(box, port, server.getsockname()[1]), ["hello from outside", "refused"])
            await box.nothing_in_python(
                f"{CONNECT}\nconnect(socket.AF_INET, ('192.0.2.1', 80))\n"
                f"connect(socket.AF_INET6, ('2001:db8::1', {port}))"
            )
        expect(no_connection(server), "a connection was accepted")
