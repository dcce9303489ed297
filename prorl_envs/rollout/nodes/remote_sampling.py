"""Model calls of a node: the head's router chooses the server, the node samples there.

The prompt's ids go from the node to the model server, and the sampled ids come back to the node. The head
receives the prompt's length and the outcome, which is all that routing, health and pauses need.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from prorl_envs.clock import Clock
from prorl_envs.errors import ModelError
from prorl_envs.model.answer_checks import Overloaded, RouteRefused, ServerUnavailable
from prorl_envs.model.routing.pause_gate import PauseGate
from prorl_envs.model.routing.resumable_turn import in_parts, sample_on
from prorl_envs.model.types import ControllableServer, Conversation, Heard, ModelClient, Sampled, Sampling
from prorl_envs.rollout.nodes.messages import (
    CancelTurn,
    Forget,
    Hold,
    RouteTurn,
    SampleAt,
    ToHead,
    TurnAbandoned,
    TurnFailed,
    TurnSampled,
)


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn, or a part of a turn, that waits to be sampled."""

    ids: Sequence[int]
    sampling: Sampling
    session: str
    conversation: Conversation | None
    answer: asyncio.Future[Sampled]
    heard: Heard | None = None
    call: asyncio.Task[Sampled] | None = None


class RoutedModel:
    """The model as a node sees it. Implements `model.types.RoutedModelClient`.

    Args:
        connect: creates the client of a server from its URL (`Servers.connect`).
        send: sends a message to the head.
        clock: measures for how long turns are held.
    """

    def __init__(
        self, connect: Callable[[str], ModelClient], send: Callable[[ToHead], None], clock: Clock
    ) -> None:
        self._connect = connect
        self._send = send
        self._gate = PauseGate(clock)
        self._resample = False
        self._clients: dict[str, ModelClient] = {}
        self._turns: dict[int, _Turn] = {}
        self._numbers = itertools.count()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        conversation: Conversation | None = None,
        heard: Heard | None = None,
    ) -> Sampled:
        """See `RoutedModelClient.generate`."""

        async def part(ids: Sequence[int], left: Sampling, told: Heard | None) -> Sampled:
            answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
            return await self._ask(_Turn(ids, left, session, conversation, answer, told))

        return await in_parts(part, prompt_ids, sampling, lambda: self._resample, heard)

    def paused_s(self) -> float:
        """See `RoutedModelClient.paused_s`."""
        return self._gate.closed_s()

    def forget(self, session: str) -> None:
        """See `RoutedModelClient.forget`."""
        self._send(Forget(session))

    async def aclose(self) -> None:
        """Close every client."""
        while self._clients:
            await self._clients.popitem()[1].aclose()

    # Messages of the head.

    def hold(self, told: Hold) -> None:
        """Handle the start or the end of a weight update."""
        self._resample = told.resample
        if told.closed:
            self._gate.close()
        else:
            self._gate.open()

    def sample_at(self, told: SampleAt) -> None:
        """Sample a turn on a server, unless the turn is no longer waited for."""
        if (turn := self._turns.get(told.turn)) is None:
            return
        turn.call = asyncio.create_task(self._sample(turn, told), name=f"model {turn.session}")
        turn.call.add_done_callback(lambda call: self._sampled(turn, told, call))

    def hang_up(self, told: CancelTurn) -> None:
        """Cancel a call. Its tokens are discarded, and the turn continues on another server."""
        turn = self._turns.get(told.turn)
        if turn is not None and turn.call is not None:
            turn.call.cancel()

    def failed(self, told: TurnFailed) -> None:
        """Fail a turn that no server can sample."""
        turn = self._turns.get(told.turn)
        if turn is not None and not turn.answer.done():
            turn.answer.set_exception(ModelError(told.message, hint=told.hint))

    # Helpers.

    async def _ask(self, turn: _Turn) -> Sampled:
        number = next(self._numbers)
        self._turns[number] = turn
        self._send(RouteTurn(number, turn.session, len(turn.ids)))
        try:
            return await turn.answer
        finally:
            del self._turns[number]
            if turn.answer.cancelled():
                self._send(TurnAbandoned(number))
            if turn.call is not None and not turn.call.done():
                turn.call.cancel()
                await asyncio.wait({turn.call})

    async def _sample(self, turn: _Turn, told: SampleAt) -> Sampled:
        client = self._clients.get(told.address)
        if client is None:
            client = self._clients[told.address] = self._connect(told.address)
        return await sample_on(client, turn.ids, turn.sampling, turn.session, turn.conversation, turn.heard)

    def _sampled(self, turn: _Turn, told: SampleAt, call: asyncio.Task[Sampled]) -> None:
        """Report a finished call to the head, and complete the turn unless another server takes over."""
        if turn.answer.done():
            return
        if call.cancelled():  # by `hang_up`: aborted with nothing sampled
            turn.answer.set_result(Sampled((), (), "abort", told.version, told.url))
            return
        complaints = self._complaints(told.address)
        if error := call.exception():
            self._send(_error(told.turn, error, complaints))
            if not isinstance(error, ServerUnavailable):  # otherwise the head chooses another server
                turn.answer.set_exception(error)
            return
        sampled = call.result()
        newest = sampled.version_spans[-1].version if sampled.version_spans else sampled.weight_version
        self._send(
            TurnSampled(
                told.turn,
                "",
                complaints,
                finish_reason=sampled.finish_reason,
                version=newest,
                cached=sampled.cached_tokens,
            )
        )
        turn.answer.set_result(
            sampled if sampled.weight_version else replace(sampled, weight_version=told.version)
        )

    def _complaints(self, address: str) -> int:
        """Return the total number of a server's overload reports."""
        client = self._clients.get(address)
        return client.complaints if isinstance(client, ControllableServer) else 0


def _error(turn: int, error: BaseException, complaints: int) -> TurnSampled:
    match error:
        case Overloaded():
            kind = "overloaded"
        case RouteRefused():
            kind = "refused"
        case ServerUnavailable():
            kind = "unavailable"
        case _:
            kind = "model"
    message, hint = (error.message, error.hint) if isinstance(error, ModelError) else (repr(error), "")
    return TurnSampled(turn, kind, complaints, message=message, hint=hint)
