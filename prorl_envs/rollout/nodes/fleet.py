"""The nodes of a service, beside its own machine: who joins, who carries out what, who is lost.

To the engine a fleet is a crew like a worker (`engine.Crew`); to the scheduler its nodes are places.
Everything that
is decided or kept is at the head: queues, fairness, batches, the store, the router of model calls. A node
that is lost is an infrastructure failure of the attempts that were there; they are tried again elsewhere
within the service's `attempts`.
"""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from prorl_envs import __version__
from prorl_envs.clock import Clock, SystemClock
from prorl_envs.policy.pool import ModelPool
from prorl_envs.rollout import tracing
from prorl_envs.rollout.engine import Crew, Engine
from prorl_envs.rollout.episode import Episode
from prorl_envs.rollout.errors import NotFound
from prorl_envs.rollout.nodes.channel import Channel, ChannelClosed
from prorl_envs.rollout.nodes.link import Link, NodeState, lost_failure
from prorl_envs.rollout.nodes.messages import (
    Alive,
    Close,
    Closed,
    Collect,
    Collected,
    End,
    Interrupt,
    Perform,
    Performed,
    Ready,
    Refused,
    Report,
    ToHead,
    ToNode,
    Welcome,
)
from prorl_envs.rollout.nodes.reports import account_of
from prorl_envs.rollout.placement import HEAD, HERE, Limits, Place
from prorl_envs.rollout.types import Failure, Stage
from prorl_envs.rollout.views import NodeView, PoolView

log = logging.getLogger(__name__)

#: Seconds that a node gets to tell what an attempt that did not end well has come to.
COLLECT_S = 10.0
#: Lost nodes that are remembered, for whoever asks.
_REMEMBERED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the head asks of nodes and tells them.

    Args:
        environments: names that a node must know.
        fingerprint: of the head's tokenizer and chat template: a node's must be the same.
        tokenizer, model, protocol, tool_format, reasoning: as in `Welcome`.
        beat_s, silent_s, grace_s, close_s: as in `Welcome`.
        start_s: seconds that a node gets to prepare itself.
    """

    environments: Collection[str]
    fingerprint: str
    tokenizer: str = ""
    model: str = ""
    protocol: Literal["auto", "vllm", "sglang", "llamacpp", "openai"] = "auto"
    tool_format: str = "auto"
    reasoning: Literal["keep", "user_turn", "template"] = "keep"
    beat_s: float = 5.0
    silent_s: float = 30.0
    grace_s: float = 30.0
    close_s: float = 60.0
    start_s: float = 300.0


@dataclass(slots=True, eq=False)
class _Order:
    """Where a job's attempt is."""

    number: int
    link: Link
    whole: bool = False  # the attempt's account is all there


class Fleet:
    """The nodes of one service.

    Args:
        pool: routes the model calls of all nodes.
        terms: what nodes are told.
        clock: measures silence.
        head_takes_jobs: whether jobs run on the service's own machine too.
    """

    def __init__(
        self, pool: ModelPool, terms: Terms, clock: Clock | None = None, *, head_takes_jobs: bool = False
    ) -> None:
        self.head_takes_jobs = head_takes_jobs
        #: Where nodes join: a TCP port, or 0.
        self.port = 0
        self._pool = pool
        self._terms = terms
        self._clock = clock or SystemClock()
        self._here: Crew | None = None
        self._engine: Engine | None = None
        self._is_attached = asyncio.Event()
        self._links: dict[str, Link] = {}
        self._lost: list[Link] = []
        self._names = {HEAD}
        self._orders: dict[str, _Order] = {}  # by job
        self._number = 0
        self._serving: set[asyncio.Task[None]] = set()
        self._closed = False
        pool.watch(self._hold)

    def attach(self, here: Crew, engine: Engine) -> None:
        """Belong to a service.

        Args:
            here: carries out what is on the service's own machine.
            engine: hears of nodes.
        """
        self._here, self._engine = here, engine
        self._is_attached.set()

    @property
    def links(self) -> Collection[Link]:
        """The nodes that are there, in the order in which they joined, and the last that were lost."""
        return (*self._links.values(), *self._lost)

    def views(self) -> list[NodeView]:
        """The same for people."""
        places = {place.name: place for place in self._attached.scheduler.nodes}
        return [_view(link, places.get(link.name)) for link in self.links]

    def told(self) -> dict[str, dict[str, float]]:
        """By name, what each node that is there told with its last beat: see `Beat`."""
        return {link.name: link.use for link in self._links.values() if link.use}

    # What the engine asks for.

    async def perform(self, episode: Episode, stage: Stage) -> Failure | None:
        """See `Crew.perform`."""
        if episode.node == HERE:
            return await self._crew.perform(episode, stage)
        order = self._orders.get(episode.id) if stage is not Stage.INIT else self._new_order(episode)
        if order is None:  # INIT, on a node that was lost a moment ago
            return lost_failure(episode.node, "before the job began", stage)
        link = order.link
        request = episode.request.model_dump_json().encode() if stage is Stage.INIT else b""
        asked = Perform(order.number, stage, episode.attempts, episode.sample, request, tracing.carried())
        performing = asyncio.create_task(link.ask(asked, Performed, order.number))
        try:
            told = await asyncio.shield(performing)
        except asyncio.CancelledError:
            link.channel.send(Interrupt(order.number))
            while not performing.done():  # whoever cancels again gets no more than that
                try:
                    await asyncio.shield(performing)
                except asyncio.CancelledError:
                    continue
            raise
        if told is None or link.lost:
            return link.failure(stage)
        episode.active_s[stage] += told.seconds
        whole = stage is Stage.EVAL and not told.failure
        try:
            failure = Failure.model_validate_json(told.failure) if told.failure else None
            self._heed(episode, order, told.report, whole=whole)
        except (ValueError, TypeError) as error:
            return self._distrust(link, episode, stage, error)
        return failure

    async def collect(self, episode: Episode) -> None:
        """See `Crew.collect`."""
        order = self._orders.get(episode.id)
        if order is None or order.whole:
            return
        try:
            async with self._clock.timeout(COLLECT_S):
                told = await order.link.ask(Collect(order.number), Collected, order.number)
        except TimeoutError:
            log.warning("job %s: node %s does not say how far it was", episode.id, order.link.name)
            return
        if told is not None:
            try:
                self._heed(episode, order, told.report, whole=True)
            except (ValueError, TypeError) as error:
                self._distrust(order.link, episode, Stage.EVAL, error)

    async def close(self, episode: Episode) -> bool:
        """See `Crew.close`. What was on a lost node has ended with it."""
        if episode.node == HERE:
            return await self._crew.close(episode)
        order = self._orders.pop(episode.id, None)
        if order is None:
            return True
        told = await order.link.ask(Close(order.number), Closed, order.number)
        if told is None:
            self._pool.forget(episode.session)  # else the node has said so
        order.link.orders.discard(order.number)
        order.link.done += 1
        self._end_if_empty(order.link)
        return told is None or told.ok

    # Nodes.

    async def serve(self, channel: Channel[ToNode, ToHead]) -> None:
        """Let a node that has just connected take part; returns when it is gone, at once after the end."""
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
        """Let no further jobs go to a node; it finishes what it has, and stays.

        Raises:
            NotFound: there is no such node.
        """
        link = self._get(name)
        link.state = NodeState.DRAINING
        self._attached.admit_jobs(name, jobs=False)

    def undrain(self, name: str) -> None:
        """Let jobs go to a node again.

        Raises:
            NotFound: there is no such node.
        """
        link = self._get(name)
        link.state, link.goes = NodeState.READY, False
        self._attached.admit_jobs(name, jobs=True)

    async def aclose(self) -> None:
        """Let every node close everything and go, and take no other one. Idempotent."""
        self._closed = True
        for link in self._links.values():
            link.channel.send(End())
        for task in list(self._serving):
            task.cancel()
        while self._serving:
            await asyncio.wait(set(self._serving))

    async def beat(self) -> None:
        """Tell every node that the head lives, until cancelled."""
        while True:
            await self._clock.sleep(self._terms.beat_s)
            for link in self._links.values():
                link.channel.send(Alive())

    async def _welcome(self, channel: Channel[ToNode, ToHead]) -> Link | None:
        terms = self._terms
        channel.send(
            Welcome(
                version=__version__,
                tokenizer=terms.tokenizer,
                model=terms.model,
                protocol=terms.protocol,
                tool_format=terms.tool_format,
                reasoning=terms.reasoning,
                beat_s=terms.beat_s,
                silent_s=terms.silent_s,
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
            channel.send(Refused(*problem))
            return None
        link = Link(
            self._name(ready.name), channel, ready, self._pool, self._clock, terms.silent_s, self._leaving
        )
        limits = Limits(init=ready.init, run=ready.run, eval=ready.eval, live=ready.live)
        self._links[link.name] = link
        link.hold()
        log.info("node %s joins: %d episodes at once", link.name, ready.run)
        self._attached.join(link.name, limits)
        return link

    def _problem(self, ready: Ready) -> tuple[str, str] | None:
        """Why a node cannot take part, and what to do about it."""
        if ready.version != __version__:
            return (
                f"it has prorl-envs {ready.version}, and the service {__version__}",
                "install the same version on all machines",
            )
        if missing := sorted(set(self._terms.environments) - set(ready.environments)):
            return f"it does not know {', '.join(missing)}", "give all machines the same settings"
        if ready.fingerprint != self._terms.fingerprint:
            return "its tokenizer makes other ids than the service's", "give all the same tokenizer files"
        if min(ready.init, ready.run, ready.eval, ready.live) < 1:
            return "it has no room for any job", "every limit is at least 1"
        return None

    def _name(self, asked: str) -> str:
        """A name that no node has had: attempts are bound to one, and never find another behind its name."""
        asked = "".join(c if c.isalnum() or c in "-_." else "-" for c in asked[:100]) or "node"
        name, number = asked, 1
        while name in self._names:
            number += 1
            name = f"{asked}~{number}"
        self._names.add(name)
        return name

    def _lose(self, link: Link, why: str) -> None:
        level = logging.INFO if not link.orders else logging.ERROR
        log.log(level, "node %s is gone, with %d jobs: %s", link.name, len(link.orders), why)
        del self._links[link.name]
        self._lost = [*self._lost, link][-_REMEMBERED:]
        link.lose(why)
        self._attached.lost(link.name, link.failure(Stage.RUN))

    def _leaving(self, link: Link) -> None:
        log.info("node %s would go; it finishes %d jobs", link.name, len(link.orders))
        link.goes = True
        self.drain(link.name)
        self._end_if_empty(link)

    def _end_if_empty(self, link: Link) -> None:
        if link.goes and not link.orders:
            link.channel.send(End())

    def _hold(self) -> None:
        for link in self._links.values():
            link.hold()

    # Steps.

    def _new_order(self, episode: Episode) -> _Order | None:
        link = self._links.get(episode.node)
        if link is None:
            return None
        self._number += 1
        order = self._orders[episode.id] = _Order(self._number, link)
        link.orders.add(order.number)
        return order

    def _heed(self, episode: Episode, order: _Order, report: Report, *, whole: bool) -> None:
        """Take over what a node tells of an attempt.

        Raises:
            ValueError, TypeError: it makes no sense.
        """
        episode.attempt.told = account_of(report)
        order.whole = whole

    def _distrust(self, link: Link, episode: Episode, stage: Stage, error: Exception) -> Failure:
        """Hang up on a node that tells nonsense."""
        log.error("node %s tells nonsense of job %s: %s", link.name, episode.id, error)
        link.channel.close()
        return lost_failure(link.name, "it told nonsense", stage)

    def _get(self, name: str) -> Link:
        link = self._links.get(name)
        if link is None:
            raise NotFound(f"no node {name!r}", hint="GET /v1/nodes lists them")
        return link

    @property
    def _crew(self) -> Crew:
        if self._here is None:
            raise AssertionError("attach comes first")
        return self._here

    @property
    def _attached(self) -> Engine:
        if self._engine is None:
            raise AssertionError("attach comes first")
        return self._engine


def _view(link: Link, place: Place | None) -> NodeView:
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
        live=place.live if place is not None else 0,
        live_limit=link.ready.live,
        attempts=link.done,
        sandboxes=int(link.use.get("open", 0)) if place is not None else 0,
    )
