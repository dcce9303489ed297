"""The head's state of one node: its attempts, turns and heartbeats."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from prorl_envs.clock import Clock
from prorl_envs.errors import ModelError, NodeLost
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.types import Sampled
from prorl_envs.rollout.api.types import Failure, Stage
from prorl_envs.rollout.episode.job import Job
from prorl_envs.rollout.nodes.messages import (
    Hold,
    NodeInfo,
    NodeMessage,
    ServerChoice,
    SessionClosed,
    Terms,
    TurnAbandoned,
    TurnRequested,
    TurnSampled,
)
from prorl_envs.rollout.nodes.worker import NodeWorker

log = logging.getLogger(__name__)


class NodeState(StrEnum):
    """State of a node."""

    READY = "ready"
    DRAINING = "draining"  # the node finishes its jobs and gets no new ones
    LOST = "lost"


def lost_failure(node: str, reason: str, stage: Stage) -> Failure:
    """Return the failure of a stage whose node is lost."""
    error = NodeLost(f"node {node} was lost: {reason}", hint="see the logs of the service and of Ray")
    return Failure(
        kind=error.kind, stage=stage, message=error.message, hint=error.hint, retryable=error.retryable
    )


@dataclass(eq=False)
class RemoteNode:
    """Node of the fleet, as the head knows it.

    Args:
        name: name of the node, which no other node has or had.
        handle: access to the node.
        info: description of the node.
        pool: routes the node's turns.
        terms: heartbeat interval and timeout.
        clock: measures the time without an answer.

    Attributes:
        reason: reason why the node was lost, or "".
        usage: values of the last heartbeat, see `NodeWorker.usage`.
        orders: jobs by the numbers of their attempts on the node; `finished`: number of closed attempts.
    """

    name: str
    handle: NodeWorker
    info: NodeInfo
    pool: ModelPool
    terms: Terms
    clock: Clock
    state: NodeState = NodeState.READY
    reason: str = ""
    usage: dict[str, float] = field(default_factory=dict)
    orders: dict[int, Job] = field(default_factory=dict)
    finished: int = 0
    _turns: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _calls: set[asyncio.Future[Any]] = field(default_factory=set)
    _complaints: dict[str, int] = field(default_factory=dict)
    _hold_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def lost(self) -> bool:
        return self.state is NodeState.LOST

    @property
    def turns(self) -> int:
        """Number of the node's unfinished turns."""
        return len(self._turns)

    def failure(self, stage: Stage) -> Failure:
        """Return the failure of a stage that was on the node when it was lost."""
        return lost_failure(self.name, self.reason, stage)

    async def call[T](self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call of the handle, and return its answer.

        Raises:
            NodeLost: the node is lost, or becomes lost before it answers.
        """
        if self.lost:
            call.close()
            raise NodeLost(self.reason)
        answer = asyncio.ensure_future(call)
        self._calls.add(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.lost and task is not None and not task.cancelling():
                raise NodeLost(self.reason) from None
            raise
        finally:
            self._calls.discard(answer)

    async def run(self) -> None:
        """Route the node's turns and check its heartbeats until it is lost.

        Raises:
            NodeLost: always, with the reason.
        """
        tasks = {asyncio.create_task(self._receive()), asyncio.create_task(self._heartbeats())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def hold(self) -> None:
        """Notify the node whether turns are held. Returns once the node has confirmed the current state.

        Raises:
            NodeLost: the node is lost, or does not answer in time.
        """
        async with self._hold_lock:  # one call at a time, since calls may overtake each other
            while True:
                hold = Hold(closed=self.pool.paused, resample=self.pool.resampled)
                await self._in_time(self.call(self.handle.hold(hold)))
                if hold == Hold(closed=self.pool.paused, resample=self.pool.resampled):
                    return

    def lose(self, reason: str) -> None:
        """Mark the node as lost, and cancel all calls and turns that wait for it."""
        self.state, self.reason = NodeState.LOST, reason
        for waiting in [*self._calls, *self._turns.values()]:
            waiting.cancel()

    async def _in_time[T](self, call: Awaitable[T]) -> T:
        """Await a call that a node can answer at once.

        Raises:
            NodeLost: the node did not answer within the heartbeat timeout.
        """
        timeout_s = self.terms.heartbeat_timeout_s
        try:
            async with self.clock.timeout(timeout_s):
                return await call
        except TimeoutError:
            raise NodeLost(f"it did not answer for {timeout_s:g} s") from None

    async def _heartbeats(self) -> None:
        while True:
            self.usage = await self._in_time(self.call(self.handle.usage()))
            await self.clock.sleep(self.terms.heartbeat_s)

    async def _receive(self) -> None:
        while True:
            for message in await self.call(self.handle.messages()):
                self._handle(message)

    def _handle(self, message: NodeMessage) -> None:
        match message:
            case TurnRequested(turn):
                task = self._turns[turn] = asyncio.create_task(self._route_turn(message))
                task.add_done_callback(lambda done: self._turn_ended(turn, done))
            case TurnAbandoned(turn):
                if abandoned := self._turns.get(turn):
                    abandoned.cancel()
            case SessionClosed(session):
                self.pool.forget(session)
            case TurnSampled(order):
                if (job := self.orders.get(order)) and job.journal:
                    job.journal.note(message.history, message.answer)

    def _turn_ended(self, turn: int, task: asyncio.Task[None]) -> None:
        self._turns.pop(turn, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("turn %d of node %s failed because of a bug", turn, self.name, exc_info=error)

    async def _route_turn(self, request: TurnRequested) -> None:
        """Route a turn of the node: the pool chooses the servers, and the node samples on them."""
        calls = 0

        async def sample(url: str) -> Sampled:
            nonlocal calls
            calls += 1
            return await self._sample(request.turn, calls, url)

        try:
            try:
                await self.pool.turn(request.session, request.tokens, sample)
            except ModelError as error:
                await self.call(self.handle.stop_turn(request.turn, calls, error))
        except NodeLost:
            return  # `run` raises the same error

    async def _sample(self, turn: int, call: int, url: str) -> Sampled:
        """Let the node call a server once. Return the answer without ids, since the ids stay on the node.

        Raises:
            ModelError: the node reports an error.
            NodeLost: the node is lost.
        """
        server = ServerChoice(url, self.pool.address(url), self.pool.version_of(url))
        try:
            outcome = await self.call(self.handle.sample(turn, call, server))
        except asyncio.CancelledError:
            await self.call(self.handle.stop_turn(turn, call))
            raise
        if outcome.complaints > self._complaints.get(url, 0):  # answers may overtake each other
            self._complaints[url] = outcome.complaints
            self.pool.complained(url)
        if outcome.error is not None:
            raise outcome.error
        return Sampled((), (), outcome.finish_reason, outcome.version, url, cached_tokens=outcome.cached)
