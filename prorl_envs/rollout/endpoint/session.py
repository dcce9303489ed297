"""Model session of one rollout: answers calls of a harness with the model servers, and records all ids."""

import asyncio
import logging
import secrets
from dataclasses import dataclass
from functools import partial

from prorl_envs.errors import InputError, ModelError
from prorl_envs.model.types import Conversation, Partial, Sampled, Sampling
from prorl_envs.rollout.agent import tracing
from prorl_envs.rollout.agent.agent_loop import (
    PROMPT_END,
    Agent,
    Transcript,
    check_sampled,
    run_in_thread_if_long,
)
from prorl_envs.rollout.api.types import AgentLimits, StopReason
from prorl_envs.rollout.endpoint.incremental_parse import IncrementalParser, LiveAnswer
from prorl_envs.rollout.endpoint.recording import Pending, Recording
from prorl_envs.rollout.endpoint.types import EndpointAnswer, EndpointRequest, RefusalReason, RequestRefused

log = logging.getLogger(__name__)

#: Prefix of keys. It makes leaked keys recognisable.
KEY_PREFIX = "sk-prorl-"
#: Maximum number of JSON bytes per token, except for long runs of white space.
_BYTES_PER_TOKEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointLimits:
    """Limits of one rollout's endpoint, in addition to `AgentLimits`.

    Args:
        parallel: maximum number of concurrent calls; further calls wait.
        waiting: maximum number of waiting calls.
        refused: number of refused requests after which no further request is answered.
        body_bytes: maximum size of a request in bytes.
        body_s: timeout in seconds for receiving a body.
    """

    parallel: int = 16
    waiting: int = 64
    refused: int = 1000
    body_bytes: int = 16 << 20
    body_s: float = 60.0


class ModelSession:
    """Model endpoint of one rollout. Its key permits only model calls as this rollout.

    Args:
        agent: has the tokenizer, the chat template and the model servers.
        transcript: filled as calls are answered.
        limits: `max_turns` limits the number of calls, `max_tokens` each context with its answer.
        sampling: sampling settings. A request can reduce `max_tokens`. Its other sampling parameters, such as
            the temperature, are ignored, since a trainer's computations depend on fixed ones.
        session: session name; the model servers treat its calls as one conversation.
        bounds: limits that protect against too many or too large requests.
    """

    def __init__(
        self,
        agent: Agent,
        transcript: Transcript,
        limits: AgentLimits,
        sampling: Sampling,
        session: str,
        bounds: EndpointLimits = EndpointLimits(),
    ) -> None:
        self.key = KEY_PREFIX + secrets.token_urlsafe(32)
        self.bounds = bounds
        self.recording = Recording(agent.renderer, agent.reasoning)
        #: Set once a limit is reached. Then no further call is answered.
        self.exhausted = asyncio.Event()
        #: Reason why no further call is answered, or None.
        self.reason: StopReason | None = None
        #: The limit that was reached, or None.
        self.limit: StopReason | None = None
        #: The failure of the last call, or None.
        self.failure: ModelError | None = None
        #: True if the last call was refused because its prompt was too long.
        self.context_full = False
        self.refused = 0
        self.last_used = agent.clock.monotonic()
        self._agent = agent
        self._transcript = transcript
        self._limits = limits
        self._sampling = sampling
        self._session = session
        self._started_turns = 0
        self._calls: dict[asyncio.Task[object], LiveAnswer] = {}
        self._slots = asyncio.Semaphore(bounds.parallel)
        transcript.ledger = self.recording

    @property
    def calls(self) -> int:
        """Number of unfinished calls, including waiting ones."""
        return len(self._calls)

    async def call(self, request: EndpointRequest, live: LiveAnswer | None = None) -> EndpointAnswer:
        """Answer one request. If the call is cancelled, sampling stops, and the tokens sampled so far are
        recorded as an unfinished answer if the model server streams them.

        Args:
            request: the request.
            live: receives the answer while it is sampled; None if the client does not stream.

        Raises:
            RequestRefused: a limit is reached, the conversation cannot be rendered, or the model failed.
        """
        self.last_used = self._agent.clock.monotonic()
        if self.reason is not None:
            raise RequestRefused(RefusalReason.ENDED, f"this rollout has ended: {self.reason}")
        if len(self._calls) >= self.bounds.parallel + self.bounds.waiting:
            raise RequestRefused(RefusalReason.BUSY, "this rollout has too many unfinished requests")
        task, live = asyncio.current_task(), live or LiveAnswer()
        assert task is not None
        self._calls[task] = live
        try:
            async with self._slots:
                return await self._call(request, live)
        except asyncio.CancelledError:
            self.count_refused()
            raise
        finally:
            del self._calls[task]
            self.last_used = self._agent.clock.monotonic()

    def count_tokens(self, request: EndpointRequest) -> int:
        """Return the number of tokens in a request's prompt.

        Raises:
            RequestRefused: the conversation cannot be rendered.
        """
        self._check_size(request)
        try:
            return len(self.recording.prompt(request.messages, request.tools).ids)
        except InputError as error:
            raise RequestRefused(RefusalReason.INVALID, str(error)) from error

    async def aclose(self) -> None:
        """Refuse further calls, and cancel unfinished calls. Idempotent."""
        self.reason = self.reason or StopReason.FINISHED
        calls = [call for call in self._calls if call is not asyncio.current_task()]
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls)

    def end(self, reason: StopReason) -> None:
        """Stop the session at a limit: refuse further calls, but answer unfinished calls."""
        self.reason = self.limit = self.reason or reason
        self.exhausted.set()

    def count_refused(self) -> None:
        """Count a refused or cancelled request. Stop the session after too many of them."""
        self.refused += 1
        if self.refused >= self.bounds.refused:
            self.end(StopReason.TURN_LIMIT)

    # Steps.

    async def _call(self, request: EndpointRequest, live: LiveAnswer) -> EndpointAnswer:
        if self.reason is not None:
            raise RequestRefused(RefusalReason.ENDED, f"this rollout has ended: {self.reason}")
        if self._started_turns >= self._limits.max_turns:
            self.end(StopReason.TURN_LIMIT)
            raise RequestRefused(
                RefusalReason.ENDED, f"this rollout has made its {self._limits.max_turns} model calls"
            )
        self._started_turns += 1
        pending, asked_at = None, 0.0
        try:
            pending = await self._pending(request)
            live.parser = IncrementalParser(self._agent.renderer, request.tools, pending.ids[-PROMPT_END:])
            asked_at = self._agent.clock.monotonic()
            sampled = await self._sample(request, pending, live)
        except asyncio.CancelledError:
            if pending is None or not self._record_unfinished(pending, live.partial, asked_at):
                self._started_turns -= 1
            raise
        except BaseException:
            # The call does not count, so that the agent may try again. `bounds.refused` limits the retries.
            self._started_turns -= 1
            raise
        now = self._agent.clock.monotonic()
        turn, messages = self.recording.record_answer(pending, sampled, asked_at=asked_at, now=now)
        self._transcript.messages[:] = messages
        self._transcript.tools = pending.tools
        self.failure, self.context_full = None, False
        return EndpointAnswer(
            number=self.recording.turns - 1,
            turn=turn,
            finish=sampled.finish_reason,
            prompt_tokens=len(pending.ids),
            completion_tokens=len(sampled.ids),
            cached_tokens=sampled.cached_tokens or 0,
        )

    def _record_unfinished(self, pending: Pending, partial: Partial | None, asked_at: float) -> bool:
        """Record the sampled tokens of a cancelled answer. Return False if there are no tokens."""
        if partial is None or not partial.ids:
            return False
        ids, logprobs = tuple(partial.ids), tuple(partial.logprobs)
        sampled = Sampled(ids, logprobs, "abort", partial.weight_version, partial.server)
        now = self._agent.clock.monotonic()
        self.recording.record_unfinished(pending, sampled, asked_at=asked_at, now=now)
        return True

    async def _pending(self, request: EndpointRequest) -> Pending:
        self._check_size(request)
        try:
            render = partial(self.recording.prompt, request.messages, request.tools)
            return await run_in_thread_if_long(request.size, render)
        except InputError as error:
            raise RequestRefused(RefusalReason.INVALID, str(error)) from error

    def _check_size(self, request: EndpointRequest) -> None:
        """Check that a request is not so large that it cannot fit into the context. Tokenising it would take
        long.

        Raises:
            RequestRefused: the request is too large.
        """
        if request.size > self._limits.max_tokens * _BYTES_PER_TOKEN:
            raise self._too_long(request.size // 4)

    async def _sample(self, request: EndpointRequest, pending: Pending, live: LiveAnswer) -> Sampled:
        room = self._limits.max_tokens - len(pending.ids)
        if room < 1:
            raise self._too_long(len(pending.ids))
        tokens = min(self._sampling.max_tokens, room, request.max_tokens or room)
        sampling = self._sampling.model_copy(update={"max_tokens": tokens})
        try:
            with tracing.model_call(len(pending.ids)) as span:
                sampled = await self._generate(pending, sampling, live)
                tracing.note_sampled(span, sampled)
            check_sampled(sampled, tokens)
            if live.restarted and live.partly_sent:
                raise ModelError("the model server failed after a part of the answer was sent to the client")
        except ModelError as error:
            self.failure = error
            log.info("session %s: the model failed: %s", self._session, error)
            raise RequestRefused(RefusalReason.MODEL, error.message) from error
        return sampled

    async def _generate(self, pending: Pending, sampling: Sampling, live: LiveAnswer) -> Sampled:
        model = self._agent.pooled
        if model is None:
            return await self._agent.model.generate(pending.ids, sampling, session=self._session)
        conversation = Conversation(pending.messages, pending.tools)
        with self._transcript.held.counting(model.paused_s):
            return await model.generate(
                pending.ids,
                sampling,
                session=self._session,
                conversation=conversation,
                on_partial=live.receive,
            )

    def _too_long(self, tokens: int) -> RequestRefused:
        limit = self._limits.max_tokens
        self.context_full = True
        return RequestRefused(
            RefusalReason.CONTEXT,
            f"prompt is too long: this model's maximum context length is {limit} tokens, and the messages "
            f"have {tokens}",
        )
