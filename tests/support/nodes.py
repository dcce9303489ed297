"""Nodes in one event loop: the real fleet and the real node workers, with pickled arguments and results."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

from prorl_envs.clock import Clock
from prorl_envs.errors import InputError, NodeLost
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.nodes.messages import Terms
from prorl_envs.rollout.nodes.worker import NodeResources, NodeWorker
from prorl_envs.rollout.scheduling.placement import StageLimits


class LocalHandle:
    """Access of the head to a worker in the same event loop. A test can cut it off. Calls arrive in order.

    Args:
        worker: the node.

    Attributes:
        bytes, calls: sizes and number of the arguments and results so far.
        silent: calls wait forever, like those of a hung node.
        perform_gate, hold_gate: delay these calls until they are set.
    """

    def __init__(self, worker: NodeWorker) -> None:
        self.worker = worker
        self.bytes = self.calls = 0
        self.silent = False
        self.perform_gate: asyncio.Event | None = None
        self.hold_gate: asyncio.Event | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._is_cut = False

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Coroutine[Any, Any, Any]:
            return self._call(name, self._copy(args))

        return call

    def cut(self) -> None:
        """Make all further calls fail."""
        self._is_cut = True
        for task in self._running:
            task.cancel()

    async def _call(self, name: str, args: Any) -> Any:
        if self._is_cut:
            raise NodeLost("it was cut off")
        self.calls += 1
        task = asyncio.create_task(self._delivered(name, args))
        self._running.add(task)
        try:
            return self._copy(await asyncio.shield(task))
        except asyncio.CancelledError:
            if self._is_cut:
                raise NodeLost("it was cut off") from None
            raise
        finally:
            self._running.discard(task)

    async def _delivered(self, name: str, args: Any) -> Any:
        gate = {"perform": self.perform_gate, "hold": self.hold_gate}.get(name)
        if self.silent:
            await asyncio.Event().wait()
        if gate is not None:
            await gate.wait()
        return await getattr(self.worker, name)(*args)

    def _copy(self, value: Any) -> Any:
        content = pickle.dumps(value)
        self.bytes += len(content)
        return pickle.loads(content)


class LocalNode:
    """Node in the head's event loop. It joins at creation.

    Args:
        fleet: fleet that it joins.
        prepared: its resources; closed by the caller.
        name: name of the node; `limits`: its stage limits.

    Attributes:
        worker: the node; `handle`: the head's access to it.
        problem: reason why the node was refused or lost.
    """

    def __init__(
        self,
        fleet: Fleet,
        prepared: NodeResources,
        name: str,
        limits: StageLimits,
        clock: Clock | None = None,
    ) -> None:
        @asynccontextmanager
        async def resources(terms: Terms) -> AsyncIterator[NodeResources]:
            yield prepared

        self.problem = ""
        self.worker = NodeWorker(resources, limits, clock)
        self.handle = LocalHandle(self.worker)
        self._serving = asyncio.create_task(self._serve(fleet, name))

    async def gone(self) -> None:
        """Wait until the head has removed the node, and the node has closed everything."""
        await asyncio.gather(self._serving, return_exceptions=True)
        await self.worker.shutdown()

    async def cut(self) -> None:
        """Cut the node off like a node of a failed machine, and wait until it has closed everything."""
        self.handle.cut()
        await self.gone()

    async def _serve(self, fleet: Fleet, name: str) -> None:
        try:
            await fleet.serve(name, cast(NodeWorker, self.handle))
        except (NodeLost, InputError) as error:
            self.problem = error.message
