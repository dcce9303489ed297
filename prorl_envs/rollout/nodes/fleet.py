"""The nodes of a service, beside its own machine: joining, dispatch of stages, loss.

For the engine a fleet is a stage executor like a worker (`engine.StageExecutor`); for the scheduler its nodes
are places. All decisions and all stored state are at the head: queues, fairness, batches, the store, the
router of model calls. The loss of a node is an infrastructure failure of its attempts; they are retried
elsewhere within the service's `attempts`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection
from dataclasses import dataclass

from prorl_envs import __version__
from prorl_envs.clock import Clock, SystemClock
from prorl_envs.errors import InputError, NodeLost
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.rollout.agent import tracing
from prorl_envs.rollout.api.errors import NotFound
from prorl_envs.rollout.api.interactive import StepRequest
from prorl_envs.rollout.api.types import Failure, Stage
from prorl_envs.rollout.api.views import NodeView, PoolView
from prorl_envs.rollout.episode.engine import Engine, StageExecutor
from prorl_envs.rollout.episode.job import Job
from prorl_envs.rollout.nodes.handle import NodeHandle, NodeInfo, StageOrder, StageOutcome, Terms
from prorl_envs.rollout.nodes.remote_node import NodeState, RemoteNode, lost_failure
from prorl_envs.rollout.scheduling.placement import HEAD, HERE, Place

log = logging.getLogger(__name__)

#: Seconds that a node gets to report the partial result of an attempt that failed or was cancelled.
COLLECT_S = 10.0
#: Number of lost nodes that are listed.
_REMEMBERED = 32
#: Seconds between two interrupts of a stage that may not have begun on its node.
_AGAIN_S = 0.1


@dataclass(slots=True, eq=False)
class _Order:
    """A job's attempt on a node."""

    number: int
    node: RemoteNode
    whole: bool = False  # the complete attempt report has arrived


class Fleet:
    """The nodes of one service.

    Args:
        pool: routes the model calls of all nodes.
        terms: requirements for nodes, and their settings.
        clock: measures silence.
        head_takes_jobs: whether jobs run on the service's own machine too.
    """

    def __init__(
        self, pool: ModelPool, terms: Terms, clock: Clock | None = None, *, head_takes_jobs: bool = False
    ) -> None:
        self.head_takes_jobs = head_takes_jobs
        self._pool = pool
        self._terms = terms
        self._clock = clock or SystemClock()
        self._here: StageExecutor | None = None
        self._engine: Engine | None = None
        self._is_attached = asyncio.Event()
        self._nodes: dict[str, RemoteNode] = {}
        self._lost: list[RemoteNode] = []
        self._names = {HEAD}
        self._orders: dict[int, _Order] = {}  # by `id` of the job: an episode and a group may share theirs
        self._number = 0
        self._serving: set[asyncio.Task[None]] = set()
        self._closed = False
        pool.watch(self._hold)

    def attach(self, here: StageExecutor, engine: Engine) -> None:
        """Attach the fleet to a service.

        Args:
            here: carries out stages on the service's own machine.
            engine: is notified of nodes.
        """
        self._here, self._engine = here, engine
        self._is_attached.set()

    @property
    def nodes(self) -> Collection[RemoteNode]:
        """The connected nodes, in the order in which they joined, and the last lost nodes."""
        return (*self._nodes.values(), *self._lost)

    def views(self) -> list[NodeView]:
        """Return the API views of the same nodes."""
        places = {place.name: place for place in self._attached.scheduler.nodes}
        return [_view(node, places.get(node.name)) for node in self.nodes]

    def heartbeats(self) -> dict[str, dict[str, float]]:
        """Return each connected node's last usage by name: see `NodeUsage`."""
        return {node.name: node.use for node in self._nodes.values() if node.use}

    # Requests of the engine.

    async def perform(self, episode: Job, stage: Stage) -> Failure | None:
        """See `StageExecutor.perform`."""
        if episode.node == HERE:
            return await self._crew.perform(episode, stage)
        return await self._perform(episode, stage)

    async def step(self, episode: Job, request: StepRequest | None) -> Failure | None:
        """See `StageExecutor.step`."""
        if episode.node == HERE:
            return await self._crew.step(episode, request)
        return await self._perform(episode, Stage.RUN, caller=True, step=request)

    async def _perform(
        self, episode: Job, stage: Stage, *, caller: bool = False, step: StepRequest | None = None
    ) -> Failure | None:
        order = self._orders.get(id(episode)) if stage is not Stage.INIT else self._new_order(episode)
        if order is None:  # INIT, on a node that was just lost
            return lost_failure(episode.node, "before the job started", stage)
        node = order.node
        request = episode.request if stage is Stage.INIT else None
        asked = StageOrder(
            order.number, stage, episode.attempts, episode.sample, request, tracing.carried(), caller, step
        )
        performing = asyncio.create_task(node.call(node.handle.perform(asked)))
        try:
            try:
                outcome = await asyncio.shield(performing)
            except asyncio.CancelledError:
                await self._interrupt(order, performing)
                raise
        except NodeLost as error:
            self._lose(node, error.message)
            return node.failure(stage)
        episode.active_s[stage] += outcome.seconds
        episode.attempt.remote_report = outcome.report
        order.whole = stage is Stage.EVAL and outcome.failure is None
        return outcome.failure

    async def collect(self, episode: Job) -> None:
        """See `StageExecutor.collect`."""
        order = self._orders.get(id(episode))
        if order is None or order.whole:
            return
        node = order.node
        try:
            async with self._clock.timeout(COLLECT_S):
                report = await node.call(node.handle.collect(order.number))
        except TimeoutError:
            log.warning("job %s: node %s does not say how far it was", episode.id, node.name)
        except NodeLost as error:
            self._lose(node, error.message)
        else:
            if report is not None:
                episode.attempt.remote_report, order.whole = report, True

    async def close(self, episode: Job) -> bool:
        """See `StageExecutor.close`. On a lost node nothing is left to close."""
        if episode.node == HERE:
            return await self._crew.close(episode)
        order = self._orders.pop(id(episode), None)
        if order is None:
            return True
        node = order.node
        try:
            ok = await node.call(node.handle.close(order.number))
        except NodeLost as error:
            self._lose(node, error.message)
            self._pool.forget(episode.session)  # otherwise the node has sent `SessionClosed`
            ok = True
        node.orders.discard(order.number)
        node.done += 1
        return ok

    # Nodes.

    async def serve(self, name: str, handle: NodeHandle) -> None:
        """Let a node join and give it jobs until it is lost, or the fleet is closed; then shut it down.

        Args:
            name: of the node; a suffix makes it unique.

        Raises:
            InputError: the node is refused, or cannot prepare itself.
            SandboxError: its machine cannot run sandboxes.
            NodeLost: the node is lost, or was not ready in time.
        """
        if self._closed:
            return
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._is_attached.wait()
            node = await self._prepared(name, handle)
            try:
                await node.run()
            except NodeLost as error:
                self._lose(node, error.message)
                raise
            finally:
                self._lose(node, "the service has ended")
        finally:
            await self._shut_down(handle)
            self._serving.discard(task)

    def drain(self, name: str) -> None:
        """Stop sending jobs to a node; it finishes its jobs, and stays.

        Raises:
            NotFound: there is no such node.
        """
        node = self._get(name)
        node.state = NodeState.DRAINING
        self._attached.admit_jobs(name, jobs=False)

    def undrain(self, name: str) -> None:
        """Resume sending jobs to a node.

        Raises:
            NotFound: there is no such node.
        """
        self._get(name).state = NodeState.READY
        self._attached.admit_jobs(name, jobs=True)

    async def aclose(self) -> None:
        """Shut down every node, and accept no other. Idempotent."""
        self._closed = True
        for task in list(self._serving):
            task.cancel()
        while self._serving:
            await asyncio.wait(set(self._serving))

    async def _prepared(self, name: str, handle: NodeHandle) -> RemoteNode:
        """Let a node prepare itself, and send it jobs if it meets the terms."""
        terms = self._terms
        try:
            async with self._clock.timeout(terms.start_s):
                info = await handle.prepare(terms)
        except TimeoutError:
            raise NodeLost(f"it was not ready in {terms.start_s:g} s") from None
        if problem := self._problem(info):
            raise InputError(problem[0], hint=problem[1])
        node = RemoteNode(self._name(name), handle, info, self._pool, terms, self._clock)
        await node.hold()
        self._nodes[node.name] = node
        log.info("node %s joins: %d episodes at once", node.name, info.limits.run)
        self._attached.join(node.name, info.limits)
        return node

    async def _shut_down(self, handle: NodeHandle) -> None:
        """Shut down a node that may be gone."""
        try:
            async with self._clock.timeout(self._terms.close_s):
                await handle.shutdown()
        except (NodeLost, TimeoutError) as error:
            log.debug("a node was not shut down in order: %s", error)

    def _problem(self, info: NodeInfo) -> tuple[str, str] | None:
        """Return why a node cannot join and a hint, or None."""
        if info.version != __version__:
            return (
                f"it has prorl-envs {info.version}, and the service {__version__}",
                "install the same version on all machines",
            )
        if missing := sorted(set(self._terms.environments) - set(info.environments)):
            return f"it does not know {', '.join(missing)}", "give all machines the same settings"
        if info.fingerprint != self._terms.fingerprint:
            return "its tokenizer makes other ids than the service's", "give all the same tokenizer files"
        return None

    def _name(self, asked: str) -> str:
        """Return a name that no node has had: attempts are bound to a node, and must never match a later one
        by name."""
        asked = "".join(c if c.isalnum() or c in "-_." else "-" for c in asked[:100]) or "node"
        name, number = asked, 1
        while name in self._names:
            number += 1
            name = f"{asked}~{number}"
        self._names.add(name)
        return name

    def _lose(self, node: RemoteNode, why: str) -> None:
        """Give up a node, and let its attempts fail. Idempotent."""
        if node.lost:
            return
        level = logging.INFO if not node.orders else logging.ERROR
        log.log(level, "node %s is gone, with %d jobs: %s", node.name, len(node.orders), why)
        del self._nodes[node.name]
        self._lost = [*self._lost, node][-_REMEMBERED:]
        node.lose(why)
        self._attached.lost(node.name, node.failure(Stage.RUN))

    async def _interrupt(self, order: _Order, performing: asyncio.Task[StageOutcome]) -> None:
        """Interrupt a stage, and return when no part of it runs any more. Cancellations have no effect."""
        node = order.node

        async def interrupt() -> None:
            while not performing.done():
                with contextlib.suppress(NodeLost):
                    if await node.call(node.handle.interrupt(order.number)):
                        break
                await asyncio.wait({performing}, timeout=_AGAIN_S)  # the stage has not begun
            await asyncio.wait({performing})

        interrupting = asyncio.create_task(interrupt())
        while not interrupting.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(interrupting)
        if (error := performing.exception()) is not None:
            raise error

    async def _hold(self) -> None:
        """Notify every node of a pause or its end; return when each has confirmed it, or is lost."""

        async def hold(node: RemoteNode) -> None:
            try:
                await node.hold()
            except NodeLost as error:
                self._lose(node, error.message)

        await asyncio.gather(*(hold(node) for node in list(self._nodes.values())))

    # Helpers.

    def _new_order(self, episode: Job) -> _Order | None:
        node = self._nodes.get(episode.node)
        if node is None:
            return None
        self._number += 1
        order = self._orders[id(episode)] = _Order(self._number, node)
        node.orders.add(order.number)
        return order

    def _get(self, name: str) -> RemoteNode:
        node = self._nodes.get(name)
        if node is None:
            raise NotFound(f"no node {name!r}", hint="GET /v1/nodes lists them")
        return node

    @property
    def _crew(self) -> StageExecutor:
        if self._here is None:
            raise AssertionError("attach comes first")
        return self._here

    @property
    def _attached(self) -> Engine:
        if self._engine is None:
            raise AssertionError("attach comes first")
        return self._engine


def _view(node: RemoteNode, place: Place | None) -> NodeView:
    pools = None
    if place is not None:
        waiting = {stage: len(queue) for stage, queue in place.queues.items()}
        pools = {
            stage.value: PoolView(
                limit=place.limits.of(stage), active=place.active[stage], waiting=waiting.get(stage, 0)
            )
            for stage in Stage
        }
    return NodeView(
        name=node.name,
        state=node.state,
        reason=node.why,
        pools=pools,
        jobs_with_sandbox=place.jobs_with_sandbox if place is not None else 0,
        max_jobs_with_sandbox=node.info.limits.max_jobs_with_sandbox,
        attempts=node.done,
        sandboxes=int(node.use.get("open", 0)) if place is not None else 0,
    )
