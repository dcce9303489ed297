"""Sockets of the host on a sandbox's loopback, which can be reached only from inside."""

import asyncio
import socket

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.tools.pool.sandbox_session import SandboxSession

pytestmark = pytest.mark.anyio

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
    await sandbox.close()
    with pytest.raises(SandboxError):
        await sandbox.listen_loopback()
