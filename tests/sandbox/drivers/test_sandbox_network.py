"""Sandboxes on networks of their own: names, ports, separation, replacement."""

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Network, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.drivers.network import SandboxNetwork
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.tools.pool.sandbox_session import SandboxSession

pytestmark = pytest.mark.anyio

#: Answers each TCP connection and UDP packet at port 7000 of all addresses with its name and its client.
SERVE = """
import socket, sys, threading
tcp, udp = socket.create_server(("0.0.0.0", 7000)), socket.socket(type=socket.SOCK_DGRAM)
udp.bind(("0.0.0.0", 7000))
def packets():
    while True:
        data, client = udp.recvfrom(100)
        udp.sendto(sys.argv[1].encode(), client)
threading.Thread(target=packets, daemon=True).start()
print("ready", flush=True)
while True:
    connection, client = tcp.accept()
    connection.sendall(f"{sys.argv[1]} for {client[0]}".encode())
    connection.close()
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5) as tcp:
    print(tcp.makefile().read())
with socket.socket(type=socket.SOCK_DGRAM) as udp:
    udp.settimeout(5)
    udp.sendto(b"x", (sys.argv[1], 7000))
    print(udp.recv(100).decode())
"""
#: Prints the results of connections through each link: 0, or the number of an error.
THROUGH = """
import socket, sys
for _, name in socket.if_nameindex():
    if name != "lo":
        with socket.socket() as tcp:
            tcp.settimeout(1)
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
            print(f"<{tcp.connect_ex((sys.argv[1], int(sys.argv[2])))}>")
"""
MEMBERS: dict[str, dict[str, tuple[str, ...]]] = {
    "front": {"outer": ("front",)},
    "app": {"outer": ("app", "app.alias"), "inner": ("app",)},
    "data": {"inner": ("data",)},
}


class Members:
    def __init__(self, driver: BubblewrapDriver) -> None:
        self._driver, self.network = driver, SandboxNetwork(MEMBERS)
        self.sessions: dict[str, SandboxSession] = {}
        self._servers: list[asyncio.Task[object]] = []

    async def start(self, name: str) -> None:
        mounts, masks, env = python_runtime()
        hosts = self.network.hosts(name)
        spec = SandboxSpec(mounts=mounts, masks=masks, env=env, hosts=hosts)
        self.sessions[name] = session = await SandboxSession.open(self._driver, spec)
        await self.network.join(name, session.sandbox)
        serving = session.tools.run([sys.executable, "-Ic", SERVE, name], timeout_s=1000)
        self._servers.append(asyncio.create_task(serving))
        listening = "until grep -q ':1B58 .* 0A' /proc/net/tcp; do sleep 0.02; done"
        await session.tools.run(["sh", "-c", listening], timeout_s=20)

    async def ask(self, name: str, host: str, port: int = 7000, program: str = ASK) -> str:
        argv = [sys.executable, "-Ic", program, host, str(port)]
        done = await self.sessions[name].tools.run(argv, timeout_s=20)
        return done.output.decode().strip()

    async def aclose(self) -> None:
        for session in self.sessions.values():
            await session.aclose()
        await asyncio.gather(*self._servers, return_exceptions=True)


@pytest.fixture
async def members(shared_driver: BubblewrapDriver) -> AsyncIterator[Members]:
    members = Members(shared_driver)
    try:
        for name in MEMBERS:
            await members.start(name)
        yield members
    finally:
        await members.aclose()


async def test_members_of_a_network_reach_each_other_at_the_same_ports(members: Members) -> None:
    addresses = members.network.hosts("app")
    assert sorted(addresses) == ["app", "app.alias", "data", "front"]
    for asker, host, answerer in (
        ("front", "app", "app"),
        ("front", "app.alias", "app"),
        ("app", "front", "front"),
        ("data", "app", "app"),
        ("app", "app", "app"),
    ):
        expected = f"{answerer} for {addresses[asker]}\n{answerer}"
        assert await members.ask(asker, host) == expected, (asker, host)
    assert "Connection refused" in await members.ask("front", "app", 7001)


async def test_other_networks_are_not_reached(members: Members) -> None:
    address = members.network.hosts("app")["data"]
    assert sorted(members.network.hosts("front")) == ["app", "app.alias", "front"]
    assert "unreachable" in await members.ask("front", address)
    assert "gaierror" in await members.ask("front", "data")
    assert "unreachable" in await members.ask("front", "192.0.2.1")
    # A link leads to its other end only, also without a route.
    assert await members.ask("front", address, 7000, THROUGH) in ("<11>", "<113>")


async def test_a_sandbox_replaces_the_earlier_one_of_a_member(members: Members) -> None:
    earlier = members.sessions["front"]
    for _ in range(3):
        await members.start("front")  # the earlier one may still run
        assert (await members.ask("front", "app")).startswith("app for ")
        assert (await members.ask("app", "front")).startswith("front for ")
        await earlier.aclose()
        earlier = members.sessions["front"]


async def test_a_sandbox_without_a_network_of_its_own_is_refused(shared_driver: BubblewrapDriver) -> None:
    network = SandboxNetwork(MEMBERS)
    session = await SandboxSession.open(shared_driver, SandboxSpec(network=Network(open=True)))
    with pytest.raises(SandboxError, match="host's network"):
        await network.join("app", session.sandbox)
    await session.aclose()
    session = await SandboxSession.open(shared_driver, SandboxSpec())
    await session.aclose()
    with pytest.raises(SandboxError):
        await network.join("app", session.sandbox)


async def test_names_of_members_bypass_the_proxy(shared_driver: BubblewrapDriver) -> None:
    spec = SandboxSpec(network=Network(allow=("example.org",)), hosts={"app": "10.0.0.1"})
    session = await SandboxSession.open(shared_driver, spec)
    done = await session.tools.run(["sh", "-c", "echo $no_proxy; tail -n 1 /etc/hosts"], timeout_s=20)
    await session.aclose()
    assert done.output == b"localhost,127.0.0.1,::1,app\n10.0.0.1 app\n"
