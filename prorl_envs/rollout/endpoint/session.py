"""One rollout's model: harnesses call it over HTTP, the token protocol answers, every id is recorded."""

import asyncio
import logging
import secrets
from dataclasses import dataclass
from functools import partial

from prorl_envs.errors import InputError, ModelError
from prorl_envs.policy.types import Conversation, Partial, PooledModel, Sampled, Sampling
from prorl_envs.rollout import tracing
from prorl_envs.rollout.agent import Agent, Transcript, check_sampled, elsewhere
from prorl_envs.rollout.endpoint.reading import Reader
from prorl_envs.rollout.endpoint.recording import PROMPT_END, Pending, Recording
from prorl_envs.rollout.endpoint.types import Answered, Asked, Refused, Why
from prorl_envs.rollout.endpoint.unfolding import Live, Unfolding
from prorl_envs.rollout.types import AgentLimits, StopReason

log = logging.getLogger(__name__)

#: How keys begin, so that one that got lost is known for what it is.
KEY_PREFIX = "sk-prorl-"
#: No token has more in JSON, but for runs of white space.
_BYTES_PER_TOKEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointLimits:
    """What one rollout may ask of its endpoint, beside `AgentLimits`.

    Args:
        parallel: calls that are answered at a time; further ones wait.
        waiting: calls that wait.
        refused: requests that were refused, after which no further is read.
        body_bytes: of a request.
        body_s: seconds that these may take to come.
    """

    parallel: int = 16
    waiting: int = 64
    refused: int = 1000
    body_bytes: int = 16 << 20
    body_s: float = 60.0


class ModelSession:
    """The model endpoint of one rollout. Whoever has its key speaks as that rollout, and as no other.

    Args:
        agent: tokenizer, template and model servers.
        transcript: filled as calls are answered.
        limits: `max_turns` bounds the calls, `max_tokens` each context with its answer.
        sampling: how to sample. A request can ask for fewer tokens; temperature and the like stay these, as
            a trainer computes with them.
        session: the model servers see the calls as one conversation.
        bounds: against floods.
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
        self.reader = Reader()
        #: Set once a limit is reached: no further call is answered.
        self.exhausted = asyncio.Event()
        self.reason: StopReason | None = None
        #: The limit that was reached, where one was.
        self.limit: StopReason | None = None
        #: What the last call failed with, where it did.
        self.failure: ModelError | None = None
        #: Whether the last call was refused for want of room in its context.
        self.full = False
        self.refused = 0
        self.aborted = 0
        self.touched = agent.clock.monotonic()
        self._agent = agent
        self._transcript = transcript
        self._limits = limits
        self._sampling = sampling
        self._session = session
        self._begun = 0
        self._calls: dict[asyncio.Task[object], Live] = {}
        self._slots = asyncio.Semaphore(bounds.parallel)
        transcript.ledger = self.recording

    @property
    def calls(self) -> int:
        """Calls that are being answered, or wait."""
        return len(self._calls)

    @property
    def lives(self) -> list[Live]:
        """Their answers, as far as they are sampled."""
        return list(self._calls.values())

    async def call(self, asked: Asked, live: Live | None = None) -> Answered:
        """Answer one request. Who is cancelled ends the generation; what was sampled by then is kept as an
        answer that was not finished, where the model's server tells of it (`Streaming`).

        Args:
            asked: what is asked for.
            live: told of the answer while it is sampled; None where nobody reads it then.

        Raises:
            Refused: a limit is reached, the conversation cannot be rendered, or the model failed.
        """
        self.touched = self._agent.clock.monotonic()
        if self.reason is not None:
            raise Refused(Why.ENDED, f"this rollout has ended: {self.reason}")
        if len(self._calls) >= self.bounds.parallel + self.bounds.waiting:
            raise Refused(Why.BUSY, "too many requests of this rollout at a time")
        task, live = asyncio.current_task(), live or Live()
        assert task is not None
        self._calls[task] = live
        try:
            async with self._slots:
                return await self._call(asked, live)
        except asyncio.CancelledError:
            self.aborted += 1
            self.count_refused()
            raise
        finally:
            del self._calls[task]
            self.touched = self._agent.clock.monotonic()

    def count_tokens(self, asked: Asked) -> int:
        """Tokens of a request's prompt.

        Raises:
            Refused: the conversation cannot be rendered.
        """
        self._check_size(asked)
        try:
            given = (asked.messages, asked.tools, asked.keys, asked.tools_key)
            return len(self.recording.prompt(*given).ids)
        except InputError as error:
            raise Refused(Why.INVALID, str(error)) from error

    async def aclose(self) -> None:
        """Answer nothing more, and end what is being answered. Idempotent."""
        self.reason = self.reason or StopReason.FINISHED
        calls = [call for call in self._calls if call is not asyncio.current_task()]
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls)

    def end(self, reason: StopReason) -> None:
        """A limit is reached: answer no further call; those that are being answered go on."""
        self.reason = self.limit = self.reason or reason
        self.exhausted.set()

    def count_refused(self) -> None:
        """A request came to nothing. Many end the rollout: nobody who works sends that many."""
        self.refused += 1
        if self.refused >= self.bounds.refused:
            self.end(StopReason.TURN_LIMIT)

    # Steps.

    async def _call(self, asked: Asked, live: Live) -> Answered:
        if self.reason is not None:
            raise Refused(Why.ENDED, f"this rollout has ended: {self.reason}")
        if self._begun >= self._limits.max_turns:
            self.end(StopReason.TURN_LIMIT)
            raise Refused(Why.ENDED, f"this rollout has made its {self._limits.max_turns} model calls")
        self._begun += 1
        pending, asked_at = None, 0.0
        try:
            pending = await self._pending(asked)
            live.unfolding = Unfolding(self._agent.renderer, asked.tools, pending.ids[-PROMPT_END:])
            asked_at = self._agent.clock.monotonic()
            sampled = await self._sample(asked, pending, live)
        except asyncio.CancelledError:
            if pending is None or not self._keep(pending, live.partial, asked_at):
                self._begun -= 1
            raise
        except BaseException:
            self._begun -= 1  # it can try again; `refused` and the time bound how often
            raise
        now = self._agent.clock.monotonic()
        turn, messages = self.recording.answered(pending, sampled, asked_at=asked_at, now=now)
        self._transcript.messages[:] = messages
        self._transcript.tools = pending.tools
        self.failure, self.full = None, False
        return Answered(
            number=self.recording.turns - 1,
            turn=turn,
            finish=sampled.finish_reason,
            prompt_tokens=len(pending.ids),
            completion_tokens=len(sampled.ids),
            cached_tokens=sampled.cached_tokens or 0,
        )

    def _keep(self, pending: Pending, partial: Partial | None, asked_at: float) -> bool:
        """Record what was sampled of an answer that nobody waits for any more, if something was."""
        if partial is None or not partial.ids:
            return False
        ids, logprobs = tuple(partial.ids), tuple(partial.logprobs)
        sampled = Sampled(ids, logprobs, "abort", partial.weight_version, partial.server)
        now = self._agent.clock.monotonic()
        self.recording.abandoned(pending, sampled, asked_at=asked_at, now=now)
        return True

    async def _pending(self, asked: Asked) -> Pending:
        self._check_size(asked)
        given = (asked.messages, asked.tools, asked.keys, asked.tools_key)
        try:
            new = self.recording.new_text(asked.messages, asked.keys, asked.tools_key)
            return await elsewhere(new, partial(self.recording.prompt, *given))
        except InputError as error:
            raise Refused(Why.INVALID, str(error)) from error

    def _check_size(self, asked: Asked) -> None:
        """Raises:
        Refused: there is far too much to be worth being tokenised.
        """
        if asked.size > self._limits.max_tokens * _BYTES_PER_TOKEN:
            raise self._too_long(asked.size // 4)

    async def _sample(self, asked: Asked, pending: Pending, live: Live) -> Sampled:
        room = self._limits.max_tokens - len(pending.ids)
        if room < 1:
            raise self._too_long(len(pending.ids))
        tokens = min(self._sampling.max_tokens, room, asked.max_tokens or room)
        sampling = self._sampling.model_copy(update={"max_tokens": tokens})
        try:
            with tracing.model_call(len(pending.ids)) as span:
                sampled = await self._generate(pending, sampling, live)
                tracing.note_sampled(span, sampled)
            check_sampled(sampled, tokens)
            if live.restarted and live.told:
                raise ModelError("the model's server was lost while it answered, and what it said was told")
        except ModelError as error:
            self.failure = error
            log.info("session %s: the model failed: %s", self._session, error)
            raise Refused(Why.MODEL, error.message) from error
        return sampled

    async def _generate(self, pending: Pending, sampling: Sampling, live: Live) -> Sampled:
        model = self._agent.model
        if not isinstance(model, PooledModel):
            return await model.generate(pending.ids, sampling, session=self._session)
        said = Conversation(pending.messages, pending.tools)
        with self._transcript.held.counting(model.paused_s):
            return await model.generate(
                pending.ids,
                sampling,
                session=self._session,
                conversation=said,
                heard=live.heard,
            )

    def _too_long(self, tokens: int) -> Refused:
        most = self._limits.max_tokens
        self.full = True
        return Refused(
            Why.CONTEXT,
            f"prompt is too long: this model's maximum context length is {most} tokens, and the messages "
            f"have {tokens}",
        )
