"""Nodes in one event loop: the real fleet and the real node workers, with queues as the network."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prorl_envs.clock import Clock
from prorl_envs.errors import InputError
from prorl_envs.rollout.nodes.channel import ChannelClosed, channel_pair
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.nodes.lifecycle import NodeResources, take_part
from prorl_envs.rollout.nodes.messages import Hello
from prorl_envs.rollout.nodes.worker import NodeWorker
from prorl_envs.rollout.scheduling.placement import StageLimits


class LocalNode:
    """Node beside the head, in its event loop. It joins at once.

    Args:
        fleet: fleet that it joins.
        prepared: its resources; closed by the caller.
        name: name of the node; `limits`: its stage limits.

    Attributes:
        member: the running node, when it is ready.
        problem: why the node stopped, if it failed.
    """

    def __init__(
        self,
        fleet: Fleet,
        prepared: NodeResources,
        name: str,
        limits: StageLimits,
        clock: Clock | None = None,
    ) -> None:
        self.member: NodeWorker | None = None
        self.problem = ""
        self._prepared = prepared
        self._head, self._channel = channel_pair()
        self._serving = asyncio.create_task(fleet.serve(self._head))
        self._working = asyncio.create_task(self._work(name, limits, clock))

    async def gone(self) -> None:
        """Return when both sides have stopped."""
        await asyncio.gather(self._serving, self._working, return_exceptions=True)
        if not self._serving.cancelled():
            self._serving.result()
        self._working.result()

    async def cut(self) -> None:
        """Close the connection at once; return when both sides have stopped."""
        self._channel.close()
        await self.gone()

    async def _work(self, name: str, limits: StageLimits, clock: Clock | None) -> None:
        @asynccontextmanager
        async def prepare(welcome: Hello) -> AsyncIterator[NodeResources]:
            yield self._prepared

        def joined(member: NodeWorker) -> None:
            self.member = member

        try:
            await take_part(self._channel, prepare, name=name, limits=limits, clock=clock, joined=joined)
        except (ChannelClosed, InputError) as error:
            self.problem = error.message
