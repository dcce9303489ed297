"""One node, as the head sees it: what it was told to do and has not answered yet."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from prorl_envs.clock import Clock
from prorl_envs.errors import ModelError, NodeLost
from prorl_envs.policy.pool import ModelPool
from prorl_envs.policy.protocol import Overloaded, ServerUnavailable
from prorl_envs.policy.types import FinishReason, Sampled
from prorl_envs.rollout.nodes.channel import Channel, ChannelClosed
from prorl_envs.rollout.nodes.messages import (
    AskTurn,
    Beat,
    Closed,
    Collected,
    Forget,
    HangUp,
    Hold,
    Leaving,
    Performed,
    Ready,
    SampleAt,
    ToHead,
    ToNode,
    TurnFailed,
    TurnLeft,
    TurnSampled,
)
from prorl_envs.rollout.types import Failure, Stage

log = logging.getLogger(__name__)

type _Answer = Performed | Collected | Closed


class NodeState(StrEnum):
    """Where a node is."""

    READY = "ready"
    DRAINING = "draining"  # it finishes what it has
    LOST = "lost"


@dataclass(slots=True, eq=False)
class _Asked:
    """A turn that a node has asked for."""

    task: asyncio.Task[None]
    answer: asyncio.Future[TurnSampled] | None = None


@dataclass(eq=False)
class Link:
    """What the head knows of a node, and its end of the conversation.

    Args:
        name: of the node, once for each time that one joins.
        channel: to it.
        ready: what it said of itself.
        pool: routes its turns.
        clock: measures silence.
        silent_s: without a word for so long, it is lost.
        leaving: called when the node would go.
    """

    name: str
    channel: Channel[ToNode, ToHead]
    ready: Ready
    pool: ModelPool
    clock: Clock
    silent_s: float
    leaving: Callable[["Link"], None]
    state: NodeState = NodeState.READY
    why: str = ""
    goes: bool = False  # it asked for its end
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
        """Turns that the node has asked for and that are not over."""
        return len(self._turns)

    def failure(self, stage: Stage) -> Failure:
        """What a stage comes to that was here when the node was lost."""
        return lost_failure(self.name, self.why, stage)

    async def ask[A: _Answer](self, message: ToNode, kind: type[A], order: int) -> A | None:
        """Tell the node something, and wait for what it says to that; None where the node is lost."""
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
        """Heed what the node says, until it is gone.

        Raises:
            ChannelClosed: it is.
        """
        while True:
            try:
                async with self.clock.timeout(self.silent_s):
                    message = await self.channel.receive()
            except TimeoutError:
                raise ChannelClosed(f"it has said nothing for {self.silent_s:g} s") from None
            self._heed(message)

    def hold(self) -> None:
        """Tell the node whether turns are held."""
        self.channel.send(Hold(closed=self.pool.paused, resample=self.pool.resampled))

    def lose(self, why: str) -> None:
        """The node is gone: whoever waits for it hears so."""
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
            case AskTurn(turn):
                task = asyncio.create_task(self._turn(message))
                self._turns[turn] = _Asked(task)
                task.add_done_callback(lambda _: self._turns.pop(turn, None))
            case TurnSampled(turn):
                asked = self._turns.get(turn)
                if asked is not None and asked.answer is not None and not asked.answer.done():
                    asked.answer.set_result(message)
            case TurnLeft(turn):
                if asked := self._turns.get(turn):
                    asked.task.cancel()
            case Forget(session):
                self.pool.forget(session)
            case Beat(use):
                self.use = use
            case Leaving():
                self.leaving(self)
            case Ready():
                raise ChannelClosed("it says again that it is ready")

    async def _turn(self, asked: AskTurn) -> None:
        """Have a turn sampled by the node, on the servers that the pool names."""

        async def sample(url: str) -> Sampled:
            return await self._sample(asked.turn, url)

        try:
            await self.pool.turn(asked.session, asked.tokens, sample)
        except ModelError as error:
            self.channel.send(TurnFailed(asked.turn, error.message, error.hint))

    async def _sample(self, turn: int, url: str) -> Sampled:
        """One call of a server by the node. Its ids stay there, so there are none in the answer.

        Raises:
            ModelError: as the node says.
        """
        answer: asyncio.Future[TurnSampled] = asyncio.get_running_loop().create_future()
        self._turns[turn].answer = answer
        self.channel.send(SampleAt(turn, url, self.pool.address(url), self.pool.version_of(url)))
        try:
            told = await answer
        except asyncio.CancelledError:
            self.channel.send(HangUp(turn))
            raise
        if told.complaints > self._complaints.get(url, 0):
            self.pool.complained(url)
        self._complaints[url] = told.complaints
        match told.error:
            case "":
                reason: FinishReason = _REASONS.get(told.finish_reason, "abort")
                return Sampled((), (), reason, told.version, url, cached_tokens=told.cached)
            case "overloaded":
                raise Overloaded(told.message, hint=told.hint)
            case "unavailable":
                raise ServerUnavailable(told.message, hint=told.hint)
            case _:
                raise ModelError(told.message, hint=told.hint)


_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def lost_failure(node: str, why: str, stage: Stage) -> Failure:
    """What a stage comes to whose node is gone."""
    error = NodeLost(f"node {node} was lost: {why}", hint="the service's log and the node's own say more")
    return Failure(
        kind=error.kind, stage=stage, message=error.message, hint=error.hint, retryable=error.retryable
    )
