"""Connections to and from the programs in a sandbox. Imports nothing of NeMo Gym.

The network namespace of a sandbox keeps only its loopback. Relays of this process listen in one namespace, or
on the host, and connect in another.
"""

import asyncio
import contextlib
import ipaddress
import itertools
import re
import socket
import sys
from collections.abc import Collection
from functools import partial
from pathlib import Path

from prorl_envs.errors import InputError, SandboxError
from prorl_envs.sandbox.drivers.isolated import IsolatedSandbox
from prorl_envs.sandbox.network.policy import Target
from prorl_envs.sandbox.network.proxy import Connector, Gateway, Relay

_LOOPBACK = "127.0.0.1"
#: First of the loopback addresses by which sandboxes know each other, and their number.
_ADDRESSES, _COUNT = ipaddress.IPv4Address("127.64.0.0"), 1 << 22
#: State of a listening socket in /proc/net/tcp, and maximum lines that are read of it.
_LISTENING, _TABLE_LINES = "0A", 1000
_REFRESH_S = 0.2
#: Number of refreshes of which one reads the tables in any case.
_READ_ALWAYS = 10
#: Maximum ports of its peers that a sandbox reaches.
_LINKS = 256


class SandboxPorts:
    """Relays of one sandbox. Closed with `aclose`, before the sandbox.

    Args:
        sandbox: the sandbox.
        gateway: bounds the connections.
        declared: ports of the services inside.
    """

    def __init__(self, sandbox: IsolatedSandbox, gateway: Gateway, declared: Collection[int]) -> None:
        self._sandbox = sandbox
        self._gateway = gateway
        self._declared = declared
        #: Address of this sandbox, for others that know it as a peer.
        self.address = str(_ADDRESSES + int(sandbox.id.rpartition("-")[2]) % _COUNT)
        self._relays: list[Relay] = []
        self._published: dict[int, int] = {}
        self._peers: Collection[SandboxPorts] = ()
        self._linked: set[tuple[str, int]] = set()
        self._linking: asyncio.Task[None] | None = None
        self._refreshing = asyncio.Lock()

    async def reach(self, servers: Collection[Target]) -> None:
        """Let programs inside connect to servers on the host's loopback, at the same addresses.

        Raises:
            SandboxError: the sandbox uses one of the ports itself.
        """
        for server in servers:
            listener = await self._sandbox.listen(server.host, server.port)
            self._relay(listener, partial(_connect, server.host, server.port))

    async def publish(self, port: int) -> int:
        """Return a port of the host's loopback that leads to this port inside."""
        if port not in self._published:
            listener = socket.create_server((_LOOPBACK, 0))
            self._published[port] = listener.getsockname()[1]
            self._relay(listener, partial(self._connect, _LOOPBACK, port, _LOOPBACK))
        return self._published[port]

    async def forward(self, peer: "SandboxPorts", ports: Collection[int]) -> None:
        """Let programs inside reach ports of another sandbox at 127.0.0.1."""
        for port in ports:
            await self._link(_LOOPBACK, peer, port)

    async def link(self, peers: Collection["SandboxPorts"]) -> None:
        """Let programs inside reach every port on which these sandboxes listen, at their addresses.

        Raises:
            InputError: one of them has a declared port of this sandbox, which hides it.
        """
        self._peers = [peer for peer in peers if peer is not self]
        for port in self._declared:
            if any(port in peer._declared for peer in self._peers):
                raise InputError(f"two connected sandboxes have port {port}", hint="give each its own")
        await self.refresh()
        if self._linking is None:
            self._linking = asyncio.create_task(self._keep_linked())

    async def refresh(self) -> None:
        """Listen at the ports at which the peers listen by now; all others refuse connections."""
        async with self._refreshing:
            own = await asyncio.to_thread(self._listening) if self._peers else set()
            found = {
                (peer.address, port): peer
                for peer in self._peers
                for port in await asyncio.to_thread(peer._listening) - own
            }
            for key in sorted(found.keys() - self._linked)[: _LINKS - len(self._linked)]:
                with contextlib.suppress(SandboxError):  # it has stopped, or has taken the port meanwhile
                    await self._link(key[0], found[key], key[1])
                    self._linked.add(key)

    async def aclose(self) -> None:
        """Close every relay. Idempotent."""
        if self._linking is not None:
            self._linking.cancel()
            await asyncio.wait([self._linking])
        for relay in self._relays:
            await relay.aclose()

    def _listening(self) -> set[int]:
        """Return the ports at which programs inside listen for more than their own loopback.

        Source: https://www.kernel.org/doc/html/latest/networking/proc_net_tcp.html
        """
        own = int.from_bytes(ipaddress.IPv4Address(self.address).packed, sys.byteorder)
        addresses, ports = {f"{own:08X}", "0" * 8, "0" * 32}, set()
        for table in ("tcp", "tcp6"):
            path = Path(f"/proc/{self._sandbox.first_pid}/net/{table}")
            with contextlib.suppress(OSError), path.open() as lines:  # it has stopped, or there is no IPv6
                for line in itertools.islice(lines, 1, _TABLE_LINES):  # the listening sockets come first
                    _, local, _, state, *_ = line.split()
                    address, _, port = local.partition(":")
                    if state == _LISTENING and address in addresses:
                        ports.add(int(port, 16))
        return ports

    async def _keep_linked(self) -> None:
        seen: list[list[str]] = []
        for turn in itertools.count(1):
            await asyncio.sleep(_REFRESH_S)  # the kernel does not report a new listener
            # Reading a sandbox's tables takes 8 ms of CPU, because the kernel walks its whole hash table;
            # the counts take 0.03 ms.
            counts = [each._socket_counts() for each in (self, *self._peers)]
            if counts != seen or turn % _READ_ALWAYS == 0:
                seen = counts
                await self.refresh()

    def _socket_counts(self) -> list[str]:
        """Return the numbers of TCP sockets inside. They stay the same if one replaces another."""
        found = []
        for table in ("sockstat", "sockstat6"):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{self._sandbox.first_pid}/net/{table}").read_text()
                found += re.findall(r"^TCP6?: inuse \d+", text, re.MULTILINE)
        return found

    async def _link(self, host: str, peer: "SandboxPorts", port: int) -> None:
        listener = await self._sandbox.listen(host, port)
        self._relay(listener, partial(peer._connect, peer.address, port, self.address))

    def _relay(self, listener: socket.socket, connect: Connector) -> None:
        self._relays.append(Relay(self._gateway, self._sandbox.id, listener, connect))

    async def _connect(self, host: str, port: int, client: str) -> socket.socket:
        """Connect to a service inside, which sees the address `client`."""
        return await _connect(host, port, await self._sandbox.open_socket(), client)


async def _connect(
    host: str, port: int, sock: socket.socket | None = None, client: str = ""
) -> socket.socket:
    sock = sock or socket.socket()
    try:
        sock.setblocking(False)
        if client:
            sock.bind((client, 0))
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock
