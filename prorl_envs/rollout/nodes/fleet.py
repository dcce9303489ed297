"""The nodes of a service, beside its own machine: joining, dispatch of stages, loss.

For the engine a fleet is a stage executor like a worker (`engine.StageExecutor`); for the scheduler its nodes
are places. All decisions and all stored state are at the head: queues, fairness, batches, the store, the
router of model calls. The loss of a node is an infrastructure failure of its attempts; they are retried
elsewhere within the service's `attempts`.
"""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from prorl_envs import __version__
from prorl_envs.clock import Clock, SystemClock
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.rollout.agent import tracing
from prorl_envs.rollout.api.errors import NotFound
from prorl_envs.rollout.api.types import Failure, Stage
from prorl_envs.rollout.api.views import NodeView, PoolView
from prorl_envs.rollout.episode.engine import Engine, StageExecutor
from prorl_envs.rollout.episode.job import Job
from prorl_envs.rollout.nodes.channel import ChannelClosed, NodeChannel
from prorl_envs.rollout.nodes.connection import NodeConnection, NodeState, lost_failure
from prorl_envs.rollout.nodes.messages import (
    Closed,
    CloseJob,
    Collect,
    Collected,
    HeadHeartbeat,
    Hello,
    InterruptJob,
    JoinRefused,
    Perform,
    Performed,
    Ready,
    Report,
    Shutdown,
    ToHead,
    ToNode,
)
from prorl_envs.rollout.nodes.result_codec import account_of
from prorl_envs.rollout.scheduling.placement import HEAD, HERE, Place, StageLimits

log = logging.getLogger(__name__)

#: Seconds that a node gets to report the partial result of an attempt that failed or was cancelled.
COLLECT_S = 10.0
#: Number of lost nodes that are listed.
_REMEMBERED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Requirements for nodes, and settings that nodes receive.

    Args:
        environments: names that a node must know.
        fingerprint: of the head's tokenizer and chat template: a node's must be the same.
        tokenizer, model, protocol, tool_format, reasoning: as in `Hello`.
        heartbeat_s, heartbeat_timeout_s, grace_s, close_s: as in `Hello`.
        start_s: seconds that a node gets to prepare itself.
    """

    environments: Collection[str]
    fingerprint: str
    tokenizer: str = ""
    model: str = ""
    protocol: Literal["auto", "vllm", "sglang", "llamacpp", "openai"] = "auto"
    tool_format: str = "auto"
    reasoning: Literal["keep", "user_turn", "template"] = "keep"
    heartbeat_s: float = 5.0
    heartbeat_timeout_s: float = 30.0
    grace_s: float = 30.0
    close_s: float = 60.0
    start_s: float = 300.0


@dataclass(slots=True, eq=False)
class _Order:
    """A job's attempt on a node."""

    number: int
    link: NodeConnection
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
        #: TCP port where nodes join, or 0.
        self.port = 0
        self._pool = pool
        self._terms = terms
        self._clock = clock or SystemClock()
        self._here: StageExecutor | None = None
        self._engine: Engine | None = None
        self._is_attached = asyncio.Event()
        self._links: dict[str, NodeConnection] = {}
        self._lost: list[NodeConnection] = []
        self._names = {HEAD}
        self._orders: dict[str, _Order] = {}  # by job id
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
    def links(self) -> Collection[NodeConnection]:
        """The connected nodes, in the order in which they joined, and the last lost nodes."""
        return (*self._links.values(), *self._lost)

    def views(self) -> list[NodeView]:
        """Return the API views of the same nodes."""
        places = {place.name: place for place in self._attached.scheduler.nodes}
        return [_view(link, places.get(link.name)) for link in self.links]

    def heartbeats(self) -> dict[str, dict[str, float]]:
        """Return each connected node's last heartbeat by name: see `NodeHeartbeat`."""
        return {link.name: link.use for link in self._links.values() if link.use}

    # Requests of the engine.

    async def perform(self, episode: Job, stage: Stage) -> Failure | None:
        """See `StageExecutor.perform`."""
        if episode.node == HERE:
            return await self._crew.perform(episode, stage)
        order = self._orders.get(episode.id) if stage is not Stage.INIT else self._new_order(episode)
        if order is None:  # INIT, on a node that was just lost
            return lost_failure(episode.node, "before the job started", stage)
        link = order.link
        request = episode.request.model_dump_json().encode() if stage is Stage.INIT else b""
        asked = Perform(order.number, stage, episode.attempts, episode.sample, request, tracing.carried())
        performing = asyncio.create_task(link.ask(asked, Performed, order.number))
        try:
            answer = await asyncio.shield(performing)
        except asyncio.CancelledError:
            link.channel.send(InterruptJob(order.number))
            while not performing.done():  # another cancellation has no further effect
                try:
                    await asyncio.shield(performing)
                except asyncio.CancelledError:
                    continue
            raise
        if answer is None or link.lost:
            return link.failure(stage)
        episode.active_s[stage] += answer.seconds
        whole = stage is Stage.EVAL and not answer.failure
        try:
            failure = Failure.model_validate_json(answer.failure) if answer.failure else None
            self._store_report(episode, order, answer.report, whole=whole)
        except (ValueError, TypeError) as error:
            return self._distrust(link, episode, stage, error)
        return failure

    async def collect(self, episode: Job) -> None:
        """See `StageExecutor.collect`."""
        order = self._orders.get(episode.id)
        if order is None or order.whole:
            return
        try:
            async with self._clock.timeout(COLLECT_S):
                answer = await order.link.ask(Collect(order.number), Collected, order.number)
        except TimeoutError:
            log.warning("job %s: node %s does not say how far it was", episode.id, order.link.name)
            return
        if answer is not None:
            try:
                self._store_report(episode, order, answer.report, whole=True)
            except (ValueError, TypeError) as error:
                self._distrust(order.link, episode, Stage.EVAL, error)

    async def close(self, episode: Job) -> bool:
        """See `StageExecutor.close`. On a lost node nothing is left to close."""
        if episode.node == HERE:
            return await self._crew.close(episode)
        order = self._orders.pop(episode.id, None)
        if order is None:
            return True
        answer = await order.link.ask(CloseJob(order.number), Closed, order.number)
        if answer is None:
            self._pool.forget(episode.session)  # otherwise the node has sent `Forget`
        order.link.orders.discard(order.number)
        order.link.done += 1
        self._end_if_empty(order.link)
        return answer is None or answer.ok

    # Nodes.

    async def serve(self, channel: NodeChannel[ToNode, ToHead]) -> None:
        """Serve a newly connected node until it is disconnected; returns at once if the fleet is closed."""
        if self._closed:
            channel.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._is_attached.wait()
            link = await self._welcome(channel)
            if link is None:
                return
            try:
                await link.run()
            except ChannelClosed as error:
                self._lose(link, error.message)
            finally:
                if not link.lost:
                    self._lose(link, "the service has ended")
        except ChannelClosed as error:
            log.warning("a node did not get as far as joining: %s", error)
        finally:
            channel.close()
            self._serving.discard(task)

    def drain(self, name: str) -> None:
        """Stop sending jobs to a node; it finishes its jobs, and stays.

        Raises:
            NotFound: there is no such node.
        """
        link = self._get(name)
        link.state = NodeState.DRAINING
        self._attached.admit_jobs(name, jobs=False)

    def undrain(self, name: str) -> None:
        """Resume sending jobs to a node.

        Raises:
            NotFound: there is no such node.
        """
        link = self._get(name)
        link.state, link.goes = NodeState.READY, False
        self._attached.admit_jobs(name, jobs=True)

    async def aclose(self) -> None:
        """Shut down every node, and accept no other. Idempotent."""
        self._closed = True
        for link in self._links.values():
            link.channel.send(Shutdown())
        for task in list(self._serving):
            task.cancel()
        while self._serving:
            await asyncio.wait(set(self._serving))

    async def beat(self) -> None:
        """Send heartbeats to every node, until cancelled."""
        while True:
            await self._clock.sleep(self._terms.heartbeat_s)
            for link in self._links.values():
                link.channel.send(HeadHeartbeat())

    async def _welcome(self, channel: NodeChannel[ToNode, ToHead]) -> NodeConnection | None:
        terms = self._terms
        channel.send(
            Hello(
                version=__version__,
                tokenizer=terms.tokenizer,
                model=terms.model,
                protocol=terms.protocol,
                tool_format=terms.tool_format,
                reasoning=terms.reasoning,
                heartbeat_s=terms.heartbeat_s,
                heartbeat_timeout_s=terms.heartbeat_timeout_s,
                grace_s=terms.grace_s,
                close_s=terms.close_s,
            )
        )
        try:
            async with self._clock.timeout(terms.start_s):
                ready = await channel.receive()
        except TimeoutError:
            raise ChannelClosed(f"it was not ready in {terms.start_s:g} s") from None
        if not isinstance(ready, Ready):
            raise ChannelClosed(f"it begins with {type(ready).__name__}")
        if problem := self._problem(ready):
            log.error("node %s is refused: %s", ready.name, problem[0])
            channel.send(JoinRefused(*problem))
            return None
        link = NodeConnection(
            self._name(ready.name),
            channel,
            ready,
            self._pool,
            self._clock,
            terms.heartbeat_timeout_s,
            self._leaving,
        )
        limits = StageLimits(
            init=ready.init, run=ready.run, eval=ready.eval, max_jobs_with_sandbox=ready.max_jobs_with_sandbox
        )
        self._links[link.name] = link
        link.hold()
        log.info("node %s joins: %d episodes at once", link.name, ready.run)
        self._attached.join(link.name, limits)
        return link

    def _problem(self, ready: Ready) -> tuple[str, str] | None:
        """Return why a node cannot join and a hint, or None."""
        if ready.version != __version__:
            return (
                f"it has prorl-envs {ready.version}, and the service {__version__}",
                "install the same version on all machines",
            )
        if missing := sorted(set(self._terms.environments) - set(ready.environments)):
            return f"it does not know {', '.join(missing)}", "give all machines the same settings"
        if ready.fingerprint != self._terms.fingerprint:
            return "its tokenizer makes other ids than the service's", "give all the same tokenizer files"
        if min(ready.init, ready.run, ready.eval, ready.max_jobs_with_sandbox) < 1:
            return "it has no room for any job", "every limit is at least 1"
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

    def _lose(self, link: NodeConnection, why: str) -> None:
        level = logging.INFO if not link.orders else logging.ERROR
        log.log(level, "node %s is gone, with %d jobs: %s", link.name, len(link.orders), why)
        del self._links[link.name]
        self._lost = [*self._lost, link][-_REMEMBERED:]
        link.lose(why)
        self._attached.lost(link.name, link.failure(Stage.RUN))

    def _leaving(self, link: NodeConnection) -> None:
        log.info("node %s would go; it finishes %d jobs", link.name, len(link.orders))
        link.goes = True
        self.drain(link.name)
        self._end_if_empty(link)

    def _end_if_empty(self, link: NodeConnection) -> None:
        if link.goes and not link.orders:
            link.channel.send(Shutdown())

    def _hold(self) -> None:
        for link in self._links.values():
            link.hold()

    # Helpers.

    def _new_order(self, episode: Job) -> _Order | None:
        link = self._links.get(episode.node)
        if link is None:
            return None
        self._number += 1
        order = self._orders[episode.id] = _Order(self._number, link)
        link.orders.add(order.number)
        return order

    def _store_report(self, episode: Job, order: _Order, report: Report, *, whole: bool) -> None:
        """Store a node's report of an attempt.

        Raises:
            ValueError, TypeError: the report is invalid.
        """
        episode.attempt.remote_report = account_of(report)
        order.whole = whole

    def _distrust(self, link: NodeConnection, episode: Job, stage: Stage, error: Exception) -> Failure:
        """Close the connection to a node that sent an invalid report."""
        log.error("node %s reports invalid data of job %s: %s", link.name, episode.id, error)
        link.channel.close()
        return lost_failure(link.name, "it reported invalid data", stage)

    def _get(self, name: str) -> NodeConnection:
        link = self._links.get(name)
        if link is None:
            raise NotFound(f"no node {name!r}", hint="GET /v1/nodes lists them")
        return link

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


def _view(link: NodeConnection, place: Place | None) -> NodeView:
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
        name=link.name,
        state=link.state,
        reason=link.why,
        pools=pools,
        jobs_with_sandbox=place.jobs_with_sandbox if place is not None else 0,
        max_jobs_with_sandbox=link.ready.max_jobs_with_sandbox,
        attempts=link.done,
        sandboxes=int(link.use.get("open", 0)) if place is not None else 0,
    )
