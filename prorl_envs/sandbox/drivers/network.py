"""Networks of several sandboxes, which reach each other by name."""

import asyncio
import contextlib
import ipaddress
import itertools
import socket
from collections.abc import AsyncIterator, Collection, Mapping

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.sandbox.drivers.isolated import IsolatedSandbox
from prorl_envs.sandbox.network.links import add_address, connect, disconnect

_FIRST_ADDRESS = ipaddress.IPv4Address("10.213.0.2")
#: Numbers of the interfaces, each used once; the kernel numbers those of a new namespace from 1.
_indexes = itertools.count(100)


async def give_address(sandbox: Sandbox, address: str) -> None:
    """Give a sandbox an IPv4 address, at which it reaches itself. Raises SandboxError as `link`."""
    async with _netlink(sandbox) as netlink:
        add_address(netlink, address)


async def link(
    first: Sandbox, second: Sandbox, addresses: tuple[str, str], *, earlier: int | None = None
) -> int:
    """Let two sandboxes reach each other, for every protocol over IPv4, until one is closed.

    Args:
        addresses: address of each.
        earlier: number of a link of the second one that is removed.

    Returns:
        The number of the link.

    Raises:
        SandboxError: a sandbox has stopped or has the host's network, or the kernel refused.
    """
    number = next(_indexes)
    async with _netlink(first) as own, _netlink(second) as other:
        if earlier is not None:
            disconnect(other, earlier)
        connect(own, other, addresses, number)
    return number


@contextlib.asynccontextmanager
async def _netlink(sandbox: Sandbox) -> AsyncIterator[socket.socket]:
    if not isinstance(sandbox, IsolatedSandbox) or sandbox.spec.network.open:
        raise SandboxError("a sandbox with the host's network cannot be connected with others")
    try:
        with await sandbox.open_socket(netlink=True) as netlink:
            yield netlink
    except OSError as error:
        raise SandboxError(f"cannot connect sandbox {sandbox.id}: {error}") from error


class SandboxNetwork:
    """Sandboxes that reach each other, for every protocol over IPv4, and nothing else.

    Each sandbox is started with `hosts` in its spec, and then joins.

    Args:
        names: names of each member in each of its networks, by network and by member. Two members reach each
            other if they share a network.
    """

    def __init__(self, names: Mapping[str, Mapping[str, Collection[str]]]) -> None:
        self._names = names
        self._addresses = {member: str(_FIRST_ADDRESS + number) for number, member in enumerate(names)}
        self._joined: dict[str, Sandbox] = {}
        #: Links by the members that they connect.
        self._links: dict[frozenset[str], int] = {}
        self._joining = asyncio.Lock()

    def hosts(self, member: str) -> dict[str, str]:
        """Return the addresses that a member knows, by name. The first member with a name has it."""
        found: dict[str, str] = {}
        for other, networks in self._names.items():
            for network in networks.keys() & self._names[member].keys():
                found = dict.fromkeys(networks[network], self._addresses[other]) | found
        return found

    async def join(self, member: str, sandbox: Sandbox) -> None:
        """Connect a sandbox with all that have joined. It replaces the member's earlier sandbox.

        Raises:
            SandboxError: the sandbox has stopped or has the host's network, or the kernel refused.
        """
        async with self._joining:
            own = self._addresses[member]
            await give_address(sandbox, own)
            for peer, other in self._joined.items():
                if peer != member and other.alive and self._names[peer].keys() & self._names[member].keys():
                    ends = frozenset((member, peer))
                    # The kernel removes a link some time after the earlier sandbox.
                    earlier = self._links.pop(ends, None)
                    addresses = (own, self._addresses[peer])
                    self._links[ends] = await link(sandbox, other, addresses, earlier=earlier)
            self._joined[member] = sandbox
