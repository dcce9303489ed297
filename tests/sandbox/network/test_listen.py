"""Sockets of the host on a sandbox's loopback, which can be reached only from inside."""

import asyncio
import socket
import sys

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver, BubblewrapSandbox
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.sandbox.network.proxy import Relay
from prorl_envs.tools.pool.sandbox_session import SandboxSession

pytestmark = pytest.mark.anyio

#: Sends all of a request, closes that half, and prints the answer.
ASK = """
import socket
with socket.create_connection(("127.0.0.1", 8000)) as s:
    s.sendall(b"hello")
    s.shutdown(socket.SHUT_WR)
    print(s.makefile().read())
"""
CONNECT = "exec 3<>/dev/tcp/127.0.0.1/{port} && read -r line <&3 && echo got $line"


async def test_connections_from_inside_are_accepted_outside(shared_driver: BubblewrapDriver) -> None:
    places = [await SandboxSession.open(shared_driver, SandboxSpec()) for _ in range(2)]
    try:
        with await places[0].sandbox.listen_loopback() as listener:
            port = listener.getsockname()[1]
            asking = asyncio.create_task(places[0].tools.bash(CONNECT.format(port=port), timeout_s=20))
            listener.setblocking(False)
            client, _ = await asyncio.get_running_loop().sock_accept(listener)
            with client:
                client.sendall(b"hello\n")
                assert (await asking).text == "got hello\n"
            other = await places[1].tools.bash(CONNECT.format(port=port), timeout_s=20)
            assert "refused" in other.text, "another sandbox has another loopback"
            with socket.socket() as outside, pytest.raises(ConnectionRefusedError):
                outside.connect(("127.0.0.1", port))
    finally:
        for place in places:
            await place.aclose()


async def test_two_listeners_have_different_ports(shared_driver: BubblewrapDriver) -> None:
    sandbox = await shared_driver.start(SandboxSpec())
    try:
        with await sandbox.listen_loopback() as one, await sandbox.listen_loopback() as two:
            assert one.getsockname() != two.getsockname()
    finally:
        await sandbox.close()


async def test_a_closed_sandbox_has_no_loopback(shared_driver: BubblewrapDriver) -> None:
    sandbox = await shared_driver.start(SandboxSpec())
    with await sandbox.listen_loopback() as listener:
        await sandbox.close()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    with pytest.raises(SandboxError):
        await sandbox.listen_loopback()


async def test_the_host_connects_to_a_service_inside(shared_driver: BubblewrapDriver) -> None:
    place = await SandboxSession.open(shared_driver, SandboxSpec(uid=0))
    sandbox = place.sandbox
    assert isinstance(sandbox, BubblewrapSandbox)
    try:
        with await sandbox.listen("127.0.0.2", 80) as listener, await sandbox.open_socket() as client:
            client.bind(("127.64.0.1", 0))
            client.connect(("127.0.0.2", 80))
            served, address = listener.accept()
            served.close()
            assert address[0] == "127.64.0.1"
            with pytest.raises(SandboxError, match="in use"):
                await sandbox.listen("127.0.0.2", 80)
    finally:
        await place.aclose()


async def test_a_relay_passes_on_connections_and_resets_those_of_a_dead_server(
    shared_driver: BubblewrapDriver,
) -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()

    async def connect() -> socket.socket:
        sock = await asyncio.to_thread(socket.create_connection, address)
        sock.setblocking(False)
        return sock

    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    mounts, masks, _ = python_runtime()
    place = await SandboxSession.open(shared_driver, SandboxSpec(mounts=mounts, masks=masks))
    assert isinstance(place.sandbox, BubblewrapSandbox)
    relay = Relay(shared_driver.gateway, "x", await place.sandbox.listen("127.0.0.1", 8000), connect)
    ask = f"{sys.executable} -Ic '{ASK}'"
    try:
        async with server:
            both = [await place.tools.bash(ask, timeout_s=20) for _ in range(2)]
        assert [done.text for done in both] == ["HELLO\n"] * 2
        assert "reset" in (await place.tools.bash(ask, timeout_s=20)).text
        await relay.aclose()
        assert "refused" in (await place.tools.bash(ask, timeout_s=20)).text
    finally:
        await relay.aclose()
        await place.aclose()
