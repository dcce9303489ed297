"""Connections to and from the programs in a sandbox. Imports nothing of NeMo Gym.

The network namespace of a sandbox has only its loopback, and links to other sandboxes. Relays of this process
listen in one namespace, or on the host, and connect in another.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Collection
from functools import partial

from prorl_envs.sandbox.drivers.isolated import IsolatedSandbox
from prorl_envs.sandbox.drivers.network import give_address, link
from prorl_envs.sandbox.network.policy import Target
from prorl_envs.sandbox.network.proxy import Connector, Gateway, Relay

_LOOPBACK = "127.0.0.1"
#: First of the addresses by which sandboxes know each other, and their number (RFC 6598).
_ADDRESSES, _COUNT = ipaddress.IPv4Address("100.64.0.0"), 1 << 22


class SandboxPorts:
    """Relays and links of one sandbox. Closed with `aclose`, before the sandbox.

    Args:
        sandbox: the sandbox.
        gateway: bounds the connections of relays.
    """

    def __init__(self, sandbox: IsolatedSandbox, gateway: Gateway) -> None:
        self._sandbox = sandbox
        self._gateway = gateway
        #: Address of this sandbox, for others that know it as a peer.
        self.address = str(_ADDRESSES + int(sandbox.id.rpartition("-")[2]) % _COUNT)
        self._has_address = False
        self._relays: list[Relay] = []
        self._published: dict[int, int] = {}
        self._linked: set[SandboxPorts] = set()

    async def join(self) -> str:
        """Give the sandbox its address, and return it. Idempotent. Raises SandboxError as `link`."""
        if not self._has_address:
            self._has_address = True
            await give_address(self._sandbox, self.address)
        return self.address

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
            self._relay(listener, partial(self._connect, port))
        return self._published[port]

    async def forward(self, peer: "SandboxPorts", ports: Collection[int]) -> None:
        """Let programs inside reach at 127.0.0.1 ports of the same address in another sandbox."""
        for port in ports:
            listener = await self._sandbox.listen(_LOOPBACK, port)
            self._relay(listener, partial(peer._connect, port))

    async def link(self, peers: Collection["SandboxPorts"]) -> None:
        """Let this sandbox and these reach each other, at their addresses. Raises SandboxError as `link`."""
        for peer in peers:
            if peer is not self and peer not in self._linked:
                await link(self._sandbox, peer._sandbox, (self.address, peer.address))
                self._linked.add(peer)
                peer._linked.add(self)

    async def aclose(self) -> None:
        """Close every relay. Idempotent."""
        for relay in self._relays:
            await relay.aclose()

    def _relay(self, listener: socket.socket, connect: Connector) -> None:
        self._relays.append(Relay(self._gateway, self._sandbox.id, listener, connect))

    async def _connect(self, port: int) -> socket.socket:
        """Connect to a service inside."""
        return await _connect(_LOOPBACK, port, await self._sandbox.open_socket())


async def _connect(host: str, port: int, sock: socket.socket | None = None) -> socket.socket:
    sock = sock or socket.socket()
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock
