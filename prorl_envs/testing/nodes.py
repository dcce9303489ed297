"""Nodes in one event loop: the real fleet and the real members, with queues for a network."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prorl_envs.clock import Clock
from prorl_envs.errors import InputError
from prorl_envs.rollout.nodes.channel import ChannelClosed, channel_pair
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.nodes.joining import Prepared, take_part
from prorl_envs.rollout.nodes.member import Member
from prorl_envs.rollout.nodes.messages import Welcome
from prorl_envs.rollout.placement import Limits


class LocalNode:
    """A node beside the head, in its event loop. It joins at once.

    Args:
        fleet: that it joins.
        prepared: what it works with; closed by the caller.
        name: of the node; `limits`: how much may happen there at once.

    Attributes:
        member: the node at work, once it is ready.
        problem: why it is over, where that was not in order.
    """

    def __init__(
        self, fleet: Fleet, prepared: Prepared, name: str, limits: Limits, clock: Clock | None = None
    ) -> None:
        self.member: Member | None = None
        self.problem = ""
        self._prepared = prepared
        self._head, self._channel = channel_pair()
        self._serving = asyncio.create_task(fleet.serve(self._head))
        self._working = asyncio.create_task(self._work(name, limits, clock))

    async def gone(self) -> None:
        """Return once it is over on both sides."""
        await asyncio.gather(self._serving, self._working, return_exceptions=True)
        if not self._serving.cancelled():
            self._serving.result()
        self._working.result()

    async def cut(self) -> None:
        """Lose the connection at once; return when what was there has ended."""
        self._channel.close()
        await self.gone()

    async def _work(self, name: str, limits: Limits, clock: Clock | None) -> None:
        @asynccontextmanager
        async def prepare(welcome: Welcome) -> AsyncIterator[Prepared]:
            yield self._prepared

        def joined(member: Member) -> None:
            self.member = member

        try:
            await take_part(self._channel, prepare, name=name, limits=limits, clock=clock, joined=joined)
        except (ChannelClosed, InputError) as error:
            self.problem = error.message
