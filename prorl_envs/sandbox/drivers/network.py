"""Networks of several sandboxes, which reach each other by name."""

import asyncio
import ipaddress
import itertools
from collections.abc import Collection, Mapping

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.sandbox.drivers.isolated import IsolatedSandbox
from prorl_envs.sandbox.network.links import add_address, connect, disconnect

_FIRST_ADDRESS = ipaddress.IPv4Address("10.213.0.2")
#: First number of the interfaces; the kernel numbers those of a new namespace from 1.
_FIRST_INDEX = 100


class SandboxNetwork:
    """Sandboxes that reach each other, for every protocol over IPv4, and nothing else.

    The links of a sandbox end with it. Each sandbox is started with `hosts` in its spec, and then joins.

    Args:
        names: names of each member in each of its networks, by network and by member. Two members reach each
            other if they share a network.
    """

    def __init__(self, names: Mapping[str, Mapping[str, Collection[str]]]) -> None:
        self._names = names
        self._addresses = {member: str(_FIRST_ADDRESS + number) for number, member in enumerate(names)}
        self._joined: dict[str, IsolatedSandbox] = {}
        #: Interfaces of the links by the members that they connect.
        self._links: dict[frozenset[str], int] = {}
        self._indexes = itertools.count(_FIRST_INDEX)
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
        if not isinstance(sandbox, IsolatedSandbox) or sandbox.spec.network.open:
            raise SandboxError("a sandbox with the host's network cannot be connected with others")
        try:
            async with self._joining:
                await self._connect(member, sandbox)
        except OSError as error:
            raise SandboxError(f"cannot connect sandbox {sandbox.id}: {error}") from error

    async def _connect(self, member: str, sandbox: IsolatedSandbox) -> None:
        with await sandbox.open_socket(netlink=True) as own:
            add_address(own, self._addresses[member])
            for peer, other in self._joined.items():
                shared = self._names[peer].keys() & self._names[member].keys()
                if peer == member or not shared or not other.alive:
                    continue
                with await other.open_socket(netlink=True) as theirs:
                    ends = frozenset((member, peer))
                    if ends in self._links:  # the kernel removes it some time after the earlier sandbox
                        disconnect(theirs, self._links.pop(ends))
                    index = next(self._indexes)
                    connect(own, theirs, (self._addresses[member], self._addresses[peer]), index)
                    self._links[ends] = index
        self._joined[member] = sandbox
