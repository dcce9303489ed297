"""The head's connection to one node: requests without an answer, turns and state."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from prorl_envs.clock import Clock
from prorl_envs.errors import ModelError, NodeLost
from prorl_envs.model.answer_checks import Overloaded, RouteRefused, ServerUnavailable
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.types import FinishReason, Sampled
from prorl_envs.rollout.api.types import Failure, Stage
from prorl_envs.rollout.nodes.channel import ChannelClosed, NodeChannel
from prorl_envs.rollout.nodes.messages import (
    CancelTurn,
    Closed,
    Collected,
    DrainRequest,
    Forget,
    Hold,
    NodeHeartbeat,
    Performed,
    Ready,
    RouteTurn,
    SampleAt,
    ToHead,
    ToNode,
    TurnAbandoned,
    TurnFailed,
    TurnSampled,
)

log = logging.getLogger(__name__)

type _Answer = Performed | Collected | Closed


class NodeState(StrEnum):
    """State of a node."""

    READY = "ready"
    DRAINING = "draining"  # it finishes its jobs
    LOST = "lost"


@dataclass(slots=True, eq=False)
class _Asked:
    """A turn that a node has requested."""

    task: asyncio.Task[None]
    answer: asyncio.Future[TurnSampled] | None = None


@dataclass(eq=False)
class NodeConnection:
    """The head's state of a node, and its side of the channel.

    Args:
        name: of the node; unique for each join.
        channel: to the node.
        ready: the node's `Ready` message.
        pool: routes its turns.
        clock: measures silence.
        heartbeat_timeout_s: seconds without a message after which the node is lost.
        leaving: called when the node asks to leave.
    """

    name: str
    channel: NodeChannel[ToNode, ToHead]
    ready: Ready
    pool: ModelPool
    clock: Clock
    heartbeat_timeout_s: float
    leaving: Callable[["NodeConnection"], None]
    state: NodeState = NodeState.READY
    why: str = ""
    goes: bool = False  # the node asked to leave
    use: dict[str, float] = field(default_factory=dict)
    orders: set[int] = field(default_factory=set)
    done: int = 0
    _answers: dict[tuple[type[Any], int], asyncio.Future[_Answer]] = field(default_factory=dict)
    _turns: dict[int, _Asked] = field(default_factory=dict)
    _complaints: dict[str, int] = field(default_factory=dict)

    @property
    def lost(self) -> bool:
        return self.state is NodeState.LOST

    @property
    def turns(self) -> int:
        """Turns of the node that have not finished."""
        return len(self._turns)

    def failure(self, stage: Stage) -> Failure:
        """Return the failure of a stage that was on the node when it was lost."""
        return lost_failure(self.name, self.why, stage)

    async def ask[A: _Answer](self, message: ToNode, kind: type[A], order: int) -> A | None:
        """Send a request to the node and return its answer, or None if the node is lost."""
        if self.lost:
            return None
        answer = self._answers[kind, order] = asyncio.get_running_loop().create_future()
        self.channel.send(message)
        try:
            got = await answer
        except asyncio.CancelledError:
            if answer.cancelled() and self.lost:
                return None
            raise
        finally:
            self._answers.pop((kind, order), None)
        assert isinstance(got, kind)
        return got

    async def run(self) -> None:
        """Handle the node's messages until the connection is lost.

        Raises:
            ChannelClosed: the connection is lost.
        """
        while True:
            try:
                async with self.clock.timeout(self.heartbeat_timeout_s):
                    message = await self.channel.receive()
            except TimeoutError:
                raise ChannelClosed(f"it has said nothing for {self.heartbeat_timeout_s:g} s") from None
            self._heed(message)

    def hold(self) -> None:
        """Notify the node whether turns are held."""
        self.channel.send(Hold(closed=self.pool.paused, resample=self.pool.resampled))

    def lose(self, why: str) -> None:
        """Mark the node as lost, and cancel all waits for it."""
        self.state, self.why = NodeState.LOST, why
        self.channel.close()
        for answer in list(self._answers.values()):
            answer.cancel()
        for asked in list(self._turns.values()):
            asked.task.cancel()

    def _heed(self, message: ToHead) -> None:
        match message:
            case Performed(order) | Collected(order) | Closed(order):
                answer = self._answers.get((type(message), order))
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case RouteTurn(turn):
                task = asyncio.create_task(self._turn(message))
                self._turns[turn] = _Asked(task)
                task.add_done_callback(lambda _: self._turns.pop(turn, None))
            case TurnSampled(turn):
                asked = self._turns.get(turn)
                if asked is not None and asked.answer is not None and not asked.answer.done():
                    asked.answer.set_result(message)
            case TurnAbandoned(turn):
                if asked := self._turns.get(turn):
                    asked.task.cancel()
            case Forget(session):
                self.pool.forget(session)
            case NodeHeartbeat(use):
                self.use = use
            case DrainRequest():
                self.leaving(self)
            case Ready():
                raise ChannelClosed("it says again that it is ready")

    async def _turn(self, asked: RouteTurn) -> None:
        """Route a turn of the node: it samples on the servers that the pool names."""

        async def sample(url: str) -> Sampled:
            return await self._sample(asked.turn, url)

        try:
            await self.pool.turn(asked.session, asked.tokens, sample)
        except ModelError as error:
            self.channel.send(TurnFailed(asked.turn, error.message, error.hint))

    async def _sample(self, turn: int, url: str) -> Sampled:
        """Let the node call a server once. The sampled ids stay on the node, so the returned answer has none.

        Raises:
            ModelError: the node reports an error.
        """
        answer: asyncio.Future[TurnSampled] = asyncio.get_running_loop().create_future()
        self._turns[turn].answer = answer
        self.channel.send(SampleAt(turn, url, self.pool.address(url), self.pool.version_of(url)))
        try:
            outcome = await answer
        except asyncio.CancelledError:
            self.channel.send(CancelTurn(turn))
            raise
        if outcome.complaints > self._complaints.get(url, 0):
            self.pool.complained(url)
        self._complaints[url] = outcome.complaints
        match outcome.error:
            case "":
                reason: FinishReason = _REASONS.get(outcome.finish_reason, "abort")
                return Sampled((), (), reason, outcome.version, url, cached_tokens=outcome.cached)
            case "overloaded":
                raise Overloaded(outcome.message, hint=outcome.hint)
            case "refused":
                raise RouteRefused(outcome.message, hint=outcome.hint)
            case "unavailable":
                raise ServerUnavailable(outcome.message, hint=outcome.hint)
            case _:
                raise ModelError(outcome.message, hint=outcome.hint)


_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def lost_failure(node: str, why: str, stage: Stage) -> Failure:
    """Return the failure of a stage whose node is lost."""
    error = NodeLost(f"node {node} was lost: {why}", hint="the service's log and the node's own say more")
    return Failure(
        kind=error.kind, stage=stage, message=error.message, hint=error.hint, retryable=error.retryable
    )
