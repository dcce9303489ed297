"""Fleet: the nodes of a service beside its own machine. Lets nodes join, sends them stages, handles losses.

The engine uses a fleet like a worker, as a `StageExecutor`. The scheduler has a `NodeRecord` of each node.
All decisions are made and all state is stored at the head: queues, fairness, batches, the store, the router
of model calls. If a node is lost, its attempts fail with an infrastructure failure. They are retried on other
nodes, up to the setting `service.attempts`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

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
from prorl_envs.rollout.nodes.messages import NodeInfo, StageOrder, StageOutcome, Terms
from prorl_envs.rollout.nodes.remote_node import NodeState, RemoteNode, lost_failure
from prorl_envs.rollout.nodes.worker import NodeWorker
from prorl_envs.rollout.scheduling.placement import HEAD, HERE, NodeRecord

log = logging.getLogger(__name__)

#: Timeout in seconds for the result of an attempt that failed or was cancelled.
COLLECT_S = 10.0
#: Number of lost nodes that are listed.
_LISTED_LOST = 32
#: Seconds before an interrupt is repeated if the stage has not started on its node yet.
_RETRY_INTERRUPT_S = 0.1


@dataclass(slots=True, eq=False)
class _Order:
    """A job's attempt on a node."""

    number: int
    node: RemoteNode
    complete: bool = False  # the attempt's result has arrived with messages and tokens


class Fleet:
    """Fleet of nodes of one service.

    Args:
        pool: routes the model calls of all nodes.
        terms: requirements for nodes, and their settings.
        clock: measures timeouts.
        head_takes_jobs: True if jobs run on the service's own machine too.
    """

    def __init__(
        self, pool: ModelPool, terms: Terms, clock: Clock | None = None, *, head_takes_jobs: bool = False
    ) -> None:
        self.head_takes_jobs = head_takes_jobs
        self._pool = pool
        self._terms = terms
        self._clock = clock or SystemClock()
        self._executor: StageExecutor  # both are set by `attach`
        self._engine: Engine
        self._is_attached = asyncio.Event()
        self._nodes: dict[str, RemoteNode] = {}
        self._lost: list[RemoteNode] = []
        self._names = {HEAD}
        # By `id()` of the `Job` object, since an interactive episode and a group may have the same job id.
        self._orders: dict[int, _Order] = {}
        self._number = 0
        #: Nodes that may have a checkpoint of a group, by the group's id.
        self._branch_points: dict[str, set[RemoteNode]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._closed = False
        pool.watch(self._hold)

    def attach(self, local: StageExecutor, engine: Engine) -> None:
        """Attach the fleet to a service.

        Args:
            local: runs stages on the service's own machine.
            engine: is notified when nodes join or are lost.
        """
        self._executor, self._engine = local, engine
        self._is_attached.set()

    @property
    def nodes(self) -> Collection[RemoteNode]:
        """Connected nodes in the order in which they joined, then the nodes that were lost last."""
        return (*self._nodes.values(), *self._lost)

    def views(self) -> list[NodeView]:
        """Return the API views of `nodes`."""
        records = {record.name: record for record in self._engine.scheduler.nodes}
        return [_view(node, records.get(node.name)) for node in self.nodes]

    def heartbeats(self) -> dict[str, dict[str, float]]:
        """Return the last usage of each connected node by name, see `NodeWorker.usage`."""
        return {node.name: node.usage for node in self._nodes.values() if node.usage}

    # Requests of the engine.

    async def perform(self, job: Job, stage: Stage) -> Failure | None:
        if job.node == HERE:
            return await self._executor.perform(job, stage)
        return await self._perform(job, stage)

    async def step(self, job: Job, request: StepRequest | None) -> Failure | None:
        if job.node == HERE:
            return await self._executor.step(job, request)
        return await self._perform(job, Stage.RUN, caller=True, step=request)

    async def _perform(
        self, job: Job, stage: Stage, *, caller: bool = False, step: StepRequest | None = None
    ) -> Failure | None:
        order = self._orders.get(id(job)) if stage is not Stage.INIT else self._new_order(job)
        if order is None:  # the node was lost before it received INIT
            return lost_failure(job.node, "before the job started", stage)
        node = order.node
        if job.is_trunk:
            self._branch_points.setdefault(job.request.id, set()).add(node)
        stage_order = StageOrder(order.number, stage, job.sample, None, tracing.carried(), caller, step)
        if stage is Stage.INIT:
            answers = job.journal.answers if job.journal else {}
            stage_order = replace(stage_order, request=job.request, recorded=job.recorded, answers=answers)
        performing = asyncio.create_task(node.call(node.handle.perform(stage_order)))
        try:
            try:
                outcome = await asyncio.shield(performing)
            except asyncio.CancelledError:
                await self._interrupt(order, performing)
                raise
        except NodeLost as error:
            self._lose(node, error.message)
            return node.failure(stage)
        job.attempt.reported = outcome.result or job.attempt.reported
        job.attempt.progress = outcome.progress
        order.complete = stage is Stage.EVAL and outcome.failure is None
        return outcome.failure

    async def collect(self, job: Job) -> None:
        order = self._orders.get(id(job))
        if order is None or order.complete:
            return
        node = order.node
        try:
            async with self._clock.timeout(COLLECT_S):
                result = await node.call(node.handle.collect(order.number))
        except TimeoutError:
            log.warning("job %s: node %s does not report the attempt's state", job.id, node.name)
        except NodeLost as error:
            self._lose(node, error.message)
        else:
            if result is not None:
                job.attempt.reported, order.complete = result, True

    async def close(self, job: Job) -> bool:
        """See `StageExecutor.close`. Returns True if the node is lost, since its sandboxes are lost too."""
        if job.node == HERE:
            return await self._executor.close(job)
        order = self._orders.pop(id(job), None)
        if order is None:
            return True
        node = order.node
        try:
            closed = await node.call(node.handle.close(order.number))
        except NodeLost as error:
            self._lose(node, error.message)
            self._pool.forget(job.id)  # a node that is not lost sends `SessionClosed` for this
            closed = True
        node.orders.pop(order.number, None)
        node.finished += 1
        return closed

    async def forget(self, group: str) -> None:
        """See `StageExecutor.forget`."""
        await self._executor.forget(group)
        for node in self._branch_points.pop(group, ()):
            with contextlib.suppress(NodeLost):
                await node.call(node.handle.forget(group))

    # Nodes.

    async def serve(self, name: str, handle: NodeWorker) -> None:
        """Let a node join, and send it jobs until it is lost or the fleet is closed. Then shut it down.

        Args:
            name: name of the node. A suffix is added if another node has or had this name.

        Raises:
            InputError: the node does not meet the terms, or cannot prepare itself.
            SandboxError: the node's machine cannot run sandboxes.
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
                self._lose(node, "the service stopped")
        finally:
            await self._shut_down(handle)
            self._serving.discard(task)

    def drain(self, name: str) -> None:
        """Stop sending jobs to a node. It finishes its jobs and stays connected.

        Raises:
            NotFound: there is no such node.
        """
        node = self._get(name)
        node.state = NodeState.DRAINING
        self._engine.apply(self._engine.scheduler.admit(name, jobs=False))

    def undrain(self, name: str) -> None:
        """Resume sending jobs to a node.

        Raises:
            NotFound: there is no such node.
        """
        self._get(name).state = NodeState.READY
        self._engine.apply(self._engine.scheduler.admit(name, jobs=True))

    async def aclose(self) -> None:
        """Shut down every node. Later nodes are not accepted. Idempotent."""
        self._closed = True
        for task in list(self._serving):
            task.cancel()
        while self._serving:
            await asyncio.wait(set(self._serving))

    async def _prepared(self, name: str, handle: NodeWorker) -> RemoteNode:
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
        log.info("node %s joins, with at most %d jobs in RUN", node.name, info.limits.run)
        self._engine.apply(self._engine.scheduler.join(node.name, info.limits))
        return node

    async def _shut_down(self, handle: NodeWorker) -> None:
        """Shut down a node that may be gone."""
        try:
            async with self._clock.timeout(self._terms.close_s):
                await handle.shutdown()
        except (NodeLost, TimeoutError) as error:
            log.debug("a node did not confirm its shutdown: %s", error)

    def _problem(self, info: NodeInfo) -> tuple[str, str] | None:
        """Return why a node cannot join and a hint, or None."""
        if info.version != __version__:
            return (
                f"it has prorl-envs {info.version}, the service {__version__}",
                "install the same version on all machines",
            )
        if missing := sorted(set(self._terms.environments) - set(info.environments)):
            return f"it lacks the environments {', '.join(missing)}", "give all machines the same settings"
        if info.fingerprint != self._terms.fingerprint:
            hint = "give all machines the same tokenizer files"
            return "its tokenizer and the service's encode the same text differently", hint
        return None

    def _name(self, requested: str) -> str:
        """Return a name that no node has had, since attempts are bound to a node by its name."""
        base = "".join(c if c.isalnum() or c in "-_." else "-" for c in requested[:100]) or "node"
        name, number = base, 1
        while name in self._names:
            number += 1
            name = f"{base}~{number}"
        self._names.add(name)
        return name

    def _lose(self, node: RemoteNode, reason: str) -> None:
        """Mark a node as lost, so that its attempts fail. Idempotent."""
        if node.lost:
            return
        level = logging.INFO if not node.orders else logging.ERROR
        log.log(level, "node %s is lost, with %d jobs: %s", node.name, len(node.orders), reason)
        del self._nodes[node.name]
        self._lost = [*self._lost, node][-_LISTED_LOST:]
        node.lose(reason)
        self._engine.lost(node.name, node.failure(Stage.RUN))

    async def _interrupt(self, order: _Order, performing: asyncio.Task[StageOutcome]) -> None:
        """Interrupt a stage, and wait until no part of it runs, even if this call is cancelled."""
        node = order.node

        async def interrupt() -> None:
            while not performing.done():
                with contextlib.suppress(NodeLost):
                    if await node.call(node.handle.interrupt(order.number)):
                        break
                await asyncio.wait({performing}, timeout=_RETRY_INTERRUPT_S)  # not started yet
            await asyncio.wait({performing})

        interrupting = asyncio.create_task(interrupt())
        while not interrupting.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(interrupting)
        if (error := performing.exception()) is not None:
            raise error

    async def _hold(self) -> None:
        """Notify every node that a pause starts or ends. Returns once each has confirmed it, or is lost."""

        async def hold(node: RemoteNode) -> None:
            try:
                await node.hold()
            except NodeLost as error:
                self._lose(node, error.message)

        await asyncio.gather(*(hold(node) for node in list(self._nodes.values())))

    # Helpers.

    def _new_order(self, job: Job) -> _Order | None:
        node = self._nodes.get(job.node)
        if node is None:
            return None
        self._number += 1
        order = self._orders[id(job)] = _Order(self._number, node)
        node.orders[order.number] = job
        return order

    def _get(self, name: str) -> RemoteNode:
        node = self._nodes.get(name)
        if node is None:
            raise NotFound(f"no node {name!r}", hint="GET /v1/nodes lists them")
        return node


def _view(node: RemoteNode, record: NodeRecord | None) -> NodeView:
    pools = None
    if record is not None:
        waiting = {stage: len(queue) for stage, queue in record.queues.items()}
        pools = {
            stage.value: PoolView(
                limit=record.limits.of(stage), active=record.active[stage], waiting=waiting.get(stage, 0)
            )
            for stage in Stage
        }
    return NodeView(
        name=node.name,
        state=node.state,
        reason=node.reason,
        pools=pools,
        jobs_with_sandbox=record.jobs_with_sandbox if record is not None else 0,
        max_jobs_with_sandbox=node.info.limits.max_jobs_with_sandbox,
        attempts=node.finished,
        sandboxes=int(node.usage.get("open", 0)) if record is not None else 0,
    )
