"""Model calls of a node: the head's router chooses the server, and the node calls it.

Prompt ids and sampled ids are exchanged between node and model server only. The head receives the prompt's
length and the outcome, which suffice for routing, health checks and pauses.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from prorl_envs.clock import Clock
from prorl_envs.errors import ModelError
from prorl_envs.model.answer_checks import ServerUnavailable
from prorl_envs.model.routing.pause_gate import PauseGate
from prorl_envs.model.routing.resumable_turn import in_parts, sample_on
from prorl_envs.model.types import ControllableServer, Conversation, ModelClient, OnPartial, Sampled, Sampling
from prorl_envs.rollout.nodes.messages import (
    Hold,
    NodeMessage,
    ServerChoice,
    SessionClosed,
    TurnAbandoned,
    TurnOutcome,
    TurnRequested,
)


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn, or a part of a turn, that waits to be sampled."""

    ids: Sequence[int]
    sampling: Sampling
    session: str
    conversation: Conversation | None
    answer: asyncio.Future[Sampled]
    on_partial: OnPartial | None = None
    call: asyncio.Task[Sampled] | None = None
    stopped_calls: int = 0  # number of the last call that was cancelled; all calls up to it are


class RoutedModel:
    """Model client of a node. Implements `model.types.RoutedModelClient`.

    Args:
        connect: creates the client of a server from its URL (`Servers.connect`).
        clock: measures for how long turns are held.
    """

    def __init__(self, connect: Callable[[str], ModelClient], clock: Clock) -> None:
        self._connect = connect
        self._gate = PauseGate(clock)
        self._resample = False
        self._clients: dict[str, ModelClient] = {}
        self._turns: dict[int, _Turn] = {}
        self._numbers = itertools.count()
        self._messages: list[NodeMessage] = []
        self._sent = asyncio.Event()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        conversation: Conversation | None = None,
        on_partial: OnPartial | None = None,
    ) -> Sampled:

        async def part(ids: Sequence[int], remaining: Sampling, listener: OnPartial | None) -> Sampled:
            answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
            return await self._route(_Turn(ids, remaining, session, conversation, answer, listener))

        return await in_parts(part, prompt_ids, sampling, lambda: self._resample, on_partial)

    def paused_s(self) -> float:
        """See `RoutedModelClient.paused_s`."""
        return self._gate.closed_s()

    def send(self, message: NodeMessage) -> None:
        """Send a message to the head."""
        self._messages.append(message)
        self._sent.set()

    def forget(self, session: str) -> None:
        self.send(SessionClosed(session))

    async def aclose(self) -> None:
        """Close every client."""
        while self._clients:
            await self._clients.popitem()[1].aclose()

    # Calls of the head: see `NodeWorker`.

    def hold(self, hold: Hold) -> None:
        self._resample = hold.resample
        if hold.closed:
            self._gate.close()
        else:
            self._gate.open()

    async def messages(self) -> list[NodeMessage]:
        await self._sent.wait()
        self._sent.clear()
        messages, self._messages = self._messages, []
        return messages

    async def sample(self, number: int, call: int, server: ServerChoice) -> TurnOutcome:
        """See `NodeWorker.sample`. Completes the turn, unless the head will choose another server for it."""
        turn = self._turns.get(number)
        if turn is None:  # the node no longer waits for the turn
            return TurnOutcome()
        if call > turn.stopped_calls:
            turn.call = asyncio.create_task(self._sample(turn, server), name=f"model {turn.session}")
            await asyncio.wait({turn.call})
        outcome, result = self._outcome(turn.call, server)
        if turn.answer.done():
            return outcome
        if isinstance(result, Sampled):
            turn.answer.set_result(result)
        elif not isinstance(result, ServerUnavailable):  # otherwise the head chooses another server
            turn.answer.set_exception(result)
        return outcome

    async def stop_turn(self, number: int, call: int, error: ModelError | None) -> None:
        """See `NodeWorker.stop_turn`."""
        turn = self._turns.get(number)
        if turn is None:
            return
        turn.stopped_calls = max(turn.stopped_calls, call)
        if error is not None and not turn.answer.done():
            turn.answer.set_exception(error)
        if turn.call is not None and not turn.call.done():
            turn.call.cancel()
            await asyncio.wait({turn.call})

    # Helpers.

    async def _route(self, turn: _Turn) -> Sampled:
        number = next(self._numbers)
        self._turns[number] = turn
        self.send(TurnRequested(number, turn.session, len(turn.ids)))
        try:
            return await turn.answer
        finally:
            del self._turns[number]
            if turn.answer.cancelled():
                self.send(TurnAbandoned(number))
            if turn.call is not None and not turn.call.done():
                turn.call.cancel()
                await asyncio.wait({turn.call})

    async def _sample(self, turn: _Turn, server: ServerChoice) -> Sampled:
        client = self._clients.get(server.address)
        if client is None:
            client = self._clients[server.address] = self._connect(server.address)
        return await sample_on(
            client, turn.ids, turn.sampling, turn.session, turn.conversation, turn.on_partial
        )

    def _outcome(
        self, call: asyncio.Task[Sampled] | None, server: ServerChoice
    ) -> tuple[TurnOutcome, Sampled | BaseException]:
        """Return the outcome of a finished call for the head, and its result."""
        client = self._clients.get(server.address)
        complaints = client.complaints if isinstance(client, ControllableServer) else 0
        if call is None or call.cancelled():  # by `stop_turn`: equal to an aborted call without tokens
            return TurnOutcome(complaints=complaints), Sampled((), (), "abort", server.version, server.url)
        if (error := call.exception()) is not None:
            model_error = error if isinstance(error, ModelError) else ModelError(repr(error))
            return TurnOutcome(error=model_error, complaints=complaints), error
        sampled = call.result()
        outcome = TurnOutcome(
            sampled.finish_reason, sampled.newest_version, sampled.cached_tokens, complaints=complaints
        )
        return outcome, sampled if sampled.weight_version else replace(sampled, weight_version=server.version)
