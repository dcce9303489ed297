"""The agent loop: tokens in, tokens out, tools in between.

The prompt is rendered once. From then on the context grows: by what was sampled, as sampled, and by each
observation rendered as its own tokens; where a template is let rewrite the history, the ledger forks. The
loop reads sampled text to find tool calls and never turns it into tokens again.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypedDict, Unpack

from prorl_envs.clock import Clock
from prorl_envs.env.base import Message, Prompt
from prorl_envs.errors import ModelError
from prorl_envs.policy.context import Context
from prorl_envs.policy.continuation import Append, Fork, next_prompt
from prorl_envs.policy.gate import ActiveTimeout, HeldTime
from prorl_envs.policy.pieces import LONG
from prorl_envs.policy.types import (
    AssistantTurn,
    Conversation,
    ModelClient,
    PooledModel,
    Reasoning,
    Renderer,
    Sampled,
    Sampling,
)
from prorl_envs.rollout import budget, tracing
from prorl_envs.rollout.ledger import Ledger
from prorl_envs.rollout.turnstile import Turnstile
from prorl_envs.rollout.types import AgentLimits, StopReason, Trajectory
from prorl_envs.tools.types import ToolCall, ToolResult, ToolSpec

_CUT = (
    "Your answer was cut off after {tokens} tokens, before a tool call was complete. "
    "Be brief and call one tool."
)

#: Prompts kept as ids for the samples to come: more than groups begin at a time.
_PROMPTS = 64
#: Ids at a prompt's end that say whether it began the reasoning.
_PROMPT_END = 16


class Record(Protocol):
    """The conversation as tokens."""

    def __len__(self) -> int: ...

    @property
    def forks(self) -> Sequence[Trajectory]: ...

    @property
    def aborted(self) -> Sequence[Trajectory]: ...

    @property
    def turns(self) -> int: ...

    @property
    def model_s(self) -> float: ...

    @property
    def tools_s(self) -> float: ...

    def trajectory(self) -> Trajectory | None: ...


class ToolHost(Protocol):
    """What the loop needs of an environment."""

    @property
    def finish_tool(self) -> str: ...

    async def call(self, call: ToolCall, *, timeout_s: float | None = None) -> ToolResult: ...


@dataclass(slots=True)
class Transcript:
    """What has happened so far. Lives outside the loop, so that an interrupted episode still shows it.

    Args:
        messages: the conversation, readable.
        ledger: the same as tokens; None before the prompt is rendered.
        tools: on offer, where a harness has tools of its own.
        held: time for which its turns were held while weights changed. Deadlines do not count it.
    """

    messages: list[Message] = field(default_factory=list)
    ledger: Record | None = None
    tools: Sequence[ToolSpec] | None = None
    held: HeldTime = field(default_factory=HeldTime)


class HowToPlay(TypedDict):
    """What is the same whoever plays.

    limits: turns, tokens of the whole context, malformed answers in a row, seconds.
    sampling: how to sample each turn; `max_tokens` shrinks to the room that is left.
    session: the model servers see this as one conversation.
    """

    limits: AgentLimits
    sampling: Sampling
    session: str


@dataclass(slots=True)
class Agent:
    """Plays episodes with one model.

    Args:
        renderer: the model's tokenizer and chat template.
        model: the servers that sample.
        clock: measures the calls and the time limit.
        reasoning: what becomes of earlier reasoning.
    """

    renderer: Renderer
    model: ModelClient
    clock: Clock
    reasoning: Reasoning = "keep"
    pooled: PooledModel | None = field(init=False, repr=False)  # the model, where it is one; slow to ask
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock, init=False, repr=False)
    _prompts: OrderedDict[str, list[int]] = field(default_factory=OrderedDict, init=False, repr=False)
    #: Before whatever an episode computes for longer than a request to the service needs.
    turnstile: Turnstile = field(default_factory=Turnstile, init=False, repr=False)

    def __post_init__(self) -> None:
        self.pooled = self.model if isinstance(self.model, PooledModel) else None

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Ids of the conversation's beginning. The samples of a group begin alike, so it is rendered once."""
        said = json.dumps([list(prompt.messages), [tool.to_openai() for tool in prompt.tools]])
        ids = self._prompts.pop(said, None) or self.renderer.prompt(prompt.messages, prompt.tools)
        self._prompts[said] = ids
        if len(self._prompts) > _PROMPTS:
            self._prompts.popitem(last=False)
        return ids

    async def play(
        self,
        environment: ToolHost,
        prompt: Prompt,
        transcript: Transcript,
        **how: Unpack[HowToPlay],
    ) -> StopReason:
        """Run the loop to its end.

        Args:
            environment: its tools are called; it must be initialised.
            prompt: what `init` returned.
            transcript: filled as the loop goes.
            how: see `HowToPlay`.

        Raises:
            ModelError, SandboxError, ToolError: a boundary failed.
        """
        loop = await self.begin(environment, prompt, transcript, **how)
        try:
            return await loop.finish()
        finally:
            self.forget(loop.session)

    async def begin(
        self,
        environment: ToolHost,
        prompt: Prompt,
        transcript: Transcript,
        **how: Unpack[HowToPlay],
    ) -> "Loop":
        """A loop that has read its prompt and taken no turn. Arguments as of `play`."""
        async with self._reading:  # what one sample of a group has rendered, the others find
            said = sum(len(message.get("content") or "") for message in prompt.messages)
            ids = await elsewhere(said, partial(self.prompt_ids, prompt))
        return Loop(self, environment, prompt, ids, transcript, **how)

    def forget(self, session: str) -> None:
        """A conversation has ended: no model server needs to be kept for it."""
        if self.pooled is not None:
            self.pooled.forget(session)


class Loop:
    """One run of the loop, which may be taken a step at a time: by `turn`, where the model samples, or by
    `answer`, where the caller did. Time counts while it is awake; a new loop is.

    Args: as `Agent.play`, and `prompt_ids`: the prompt as ids.
    """

    def __init__(
        self,
        agent: Agent,
        environment: ToolHost,
        prompt: Prompt,
        prompt_ids: Sequence[int],
        transcript: Transcript,
        *,
        limits: AgentLimits,
        sampling: Sampling,
        session: str,
    ) -> None:
        self.agent = agent
        self.environment = environment
        self.limits = limits
        self.sampling = sampling
        self.session = session
        self.ends_at = agent.clock.monotonic() + limits.run_s
        self.malformed = 0
        self.repeats = budget.Repeats(limits.max_repeats)
        self.warned = False
        self.tools = prompt.tools
        self.tool_names = frozenset(tool.name for tool in prompt.tools)
        self.context = Context(prompt_ids)
        self.ledger = Ledger(self.context)
        self.transcript = transcript
        transcript.messages.extend(prompt.messages)
        transcript.ledger = self.ledger

    def sleep(self) -> None:
        """Stop the time: the caller does something of its own."""
        self.slept_with_s = self.seconds_left

    def wake(self) -> None:
        """Let the time go on."""
        self.ends_at = self.agent.clock.monotonic() + self.slept_with_s

    @property
    def room(self) -> int:
        """Tokens the context may still grow by."""
        return self.limits.max_tokens - len(self.context)

    @property
    def seconds_left(self) -> float:
        return self.ends_at + self.transcript.held.seconds() - self.agent.clock.monotonic()

    async def finish(self) -> StopReason:
        """Take turns until the loop ends."""
        while (reason := await self.turn()) is None:
            pass
        return reason

    async def turn(self) -> StopReason | None:
        """One model call and the tool calls it asks for; why the loop ends, or None to go on."""
        if reason := self.exhausted():
            return reason
        sampled = await self._sample()
        if sampled is None:
            return StopReason.TIME_LIMIT
        return await self._heed(sampled)

    async def answer(self, sampled: Sampled) -> StopReason | None:
        """An answer that the caller sampled after the context as it is, and the tool calls it asks for.

        Args:
            sampled: no longer than the room there is.

        Returns:
            why the loop ends, or None to go on.
        """
        self.ledger.sent(self.context)
        self.ledger.sampled(sampled, 0.0)
        self.context.extend(sampled.ids)
        return await self._heed(sampled)

    def exhausted(self) -> StopReason | None:
        """Why there is no further turn, or None."""
        if self.ledger.turns >= self.limits.max_turns:
            return StopReason.TURN_LIMIT
        return StopReason.TOKEN_LIMIT if self.room < 1 else None

    async def _heed(self, sampled: Sampled) -> StopReason | None:
        """Do what an answer asks for."""
        await self.agent.turnstile.through()
        before = len(self.context) - len(sampled.ids)
        prompt_end = self.context[max(0, before - _PROMPT_END) : before]
        answer = self.agent.renderer.parse(sampled.ids, self.tools, prompt_ids=prompt_end)
        self.transcript.messages.append(assistant_message(self.agent.renderer, answer, sampled))
        if reason := self._judge(answer, sampled):
            return reason
        observations = await self.act(answer.tool_calls)
        if isinstance(observations, StopReason):
            return observations
        if self.repeats.noticed(answer.tool_calls, observations):
            return StopReason.LOOP
        observations.extend({"role": "user", "content": note} for note in self._notes(answer, sampled))
        return await self._observe(sampled, observations)

    async def _sample(self) -> Sampled | None:
        """Sample one turn; None where the time limit came first.

        Raises:
            ModelError: it came before the first answer of the episode, or in a call that alone had taken more
                than half of the time; or the answer is not to be believed.
        """
        if self.seconds_left <= 0:
            return None
        tokens = min(self.sampling.max_tokens, self.room)
        sampling = self.sampling
        if tokens < sampling.max_tokens:
            sampling = sampling.model_copy(update={"max_tokens": tokens})
        self.ledger.sent(self.context)
        clock, held = self.agent.clock, self.transcript.held
        started, held_before = clock.monotonic(), held.seconds()
        try:
            async with ActiveTimeout(clock, self.seconds_left, held.seconds) as deadline:
                with tracing.model_call(len(self.context)) as span:
                    sampled = await self._generate(sampling)
                    tracing.note_sampled(span, sampled)
        except TimeoutError:
            if not deadline.expired():
                raise
            waited = clock.monotonic() - started - (held.seconds() - held_before)
            if self.ledger.turns and waited <= self.limits.run_s / 2:
                return None
            raise ModelError(  # such an end is not the policy's doing, so nothing is graded
                f"the model did not answer in {waited:.3g} of {self.limits.run_s:g} s",
                hint="are the model servers hung or overloaded? else raise limits.run_s",
            ) from None
        check_sampled(sampled, tokens)
        self.ledger.sampled(sampled, clock.monotonic() - started - (held.seconds() - held_before))
        self.context.extend(sampled.ids)
        return sampled

    async def _generate(self, sampling: Sampling) -> Sampled:
        model = self.agent.pooled
        if model is None:
            return await self.agent.model.generate(self.context, sampling, session=self.session)
        conversation = Conversation(self.transcript.messages, self.tools)
        with self.transcript.held.counting(model.paused_s):
            return await model.generate(
                self.context, sampling, session=self.session, conversation=conversation
            )

    def _judge(self, answer: AssistantTurn, sampled: Sampled) -> StopReason | None:
        """Does an answer without a readable tool call end the loop?"""
        if answer.tool_calls:
            self.malformed = 0
            return None
        if not answer.malformed and sampled.finish_reason != "length":
            return StopReason.NO_TOOL_CALL
        if self.room < 1:
            return StopReason.TOKEN_LIMIT
        self.malformed += 1
        return StopReason.MALFORMED if self.malformed >= self.limits.max_malformed else None

    @staticmethod
    def _notes(answer: AssistantTurn, sampled: Sampled) -> Sequence[str]:
        """What to tell the model about the calls that could not be read."""
        if answer.malformed or answer.tool_calls or sampled.finish_reason != "length":
            return answer.malformed
        return (_CUT.format(tokens=len(sampled.ids)),)

    async def act(self, calls: Sequence[ToolCall]) -> list[Message] | StopReason:
        """Run the calls in order; the observations, or why the loop ends."""
        observations: list[Message] = []
        for call in calls:
            if self.seconds_left <= 0:
                return StopReason.TIME_LIMIT
            started = self.agent.clock.monotonic()
            timeout_s = min(self.limits.tool_timeout_s, self.seconds_left)
            with tracing.tool_call(call, known=call.name in self.tool_names) as span:
                result = await self.environment.call(call, timeout_s=timeout_s)
                tracing.note_tool(span, result)
            self.ledger.tools_took(self.agent.clock.monotonic() - started)
            if call.name == self.environment.finish_tool and result.ok:
                return StopReason.FINISHED
            text = unicode(budget.cut(result.text, self.limits.max_observation_chars or len(result.text)))
            observations.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})
        return observations

    async def _observe(self, sampled: Sampled, observations: Sequence[Message]) -> StopReason | None:
        """Go on from the observations, unless they would leave no room for an answer."""
        await self.agent.turnstile.through()
        step = await self._next(sampled, observations)
        reserve = self.limits.reserve_tokens
        if reserve and not self.warned and self._left(step) <= reserve:
            step, observations = await self._squeezed(sampled, observations)
        if self._left(step) < 1:
            return StopReason.TOKEN_LIMIT
        if isinstance(step, Fork):
            self.ledger.fork(step.ids)
            self.context = Context(step.ids)
        else:
            self.ledger.observed(step.ids)
            self.context.extend(step.ids)
        self.transcript.messages.extend(observations)
        return None

    async def _next(self, sampled: Sampled, observations: Sequence[Message]) -> Append | Fork:
        messages = [*self.transcript.messages, *observations]
        agent = self.agent
        rendered = observations if agent.reasoning == "keep" else messages
        return await elsewhere(
            sum(len(message.get("content") or "") for message in rendered),
            partial(
                next_prompt,
                agent.renderer,
                agent.reasoning,
                self.context,
                sampled,
                messages,
                len(observations),
                self.tools,
            ),
        )

    def _left(self, step: Append | Fork) -> int:
        """Tokens the context may grow by after this step."""
        return (self.limits.max_tokens if isinstance(step, Fork) else self.room) - len(step.ids)

    async def _squeezed(
        self, sampled: Sampled, observations: Sequence[Message]
    ) -> tuple[Append | Fork, list[Message]]:
        """The observations, cut so that the reserve stays, as far as they can be, and the last warning."""
        self.warned = True
        warning = budget.last_words(self.limits.reserve_tokens)
        shown = [*observations, warning]
        step = await self._next(sampled, shown)
        for size in budget.sizes(observations):
            if self._left(step) >= self.limits.reserve_tokens:
                break
            shown = [*budget.shorter(observations, size), warning]
            step = await self._next(sampled, shown)
        return step, shown


async def elsewhere[T](characters: int, work: Callable[[], T]) -> T:
    """Make tokens of so many characters, in a thread where that takes milliseconds: else everybody who waits
    for the event loop waits for that."""
    return work() if characters < LONG else await asyncio.to_thread(work)


def check_sampled(sampled: Sampled, tokens: int) -> None:
    """Raises:
    ModelError: an answer that cannot be one to a request for so many tokens.
    """
    if len(sampled.ids) != len(sampled.logprobs):
        raise ModelError("the model server sent another number of log-probabilities than of tokens")
    if len(sampled.ids) > tokens:
        raise ModelError(f"the model server sampled {len(sampled.ids)} tokens, asked for {tokens} at most")
    if sampled.finish_reason == "abort":
        raise ModelError("the model server aborted the answer")


def assistant_message(renderer: Renderer, answer: AssistantTurn, sampled: Sampled) -> Message:
    """An answer as a message."""
    if answer.malformed:  # what was sampled says more than what could be read of it
        return {
            "role": "assistant",
            "content": unicode(renderer.decode(renderer.without_stop(sampled.ids))),
        }
    message: dict[str, Any] = {"role": "assistant", "content": unicode(answer.content)}
    if answer.reasoning:
        message["reasoning_content"] = unicode(answer.reasoning)
    if answer.tool_calls:
        message["tool_calls"] = [openai_call(call) for call in answer.tool_calls]
    return message


def openai_call(call: ToolCall) -> dict[str, Any]:
    """A tool call as a message has it."""
    # ASCII escapes keep lone surrogates, which JSON can spell and UTF-8 cannot.
    arguments = json.dumps(call.arguments)
    return {
        "id": unicode(call.id),
        "type": "function",
        "function": {"name": unicode(call.name), "arguments": arguments},
    }


def unicode(text: str) -> str:
    """`text` with what UTF-8 cannot carry replaced: results travel as UTF-8, and the model is hostile."""
    return text.encode("utf-8", "replace").decode("utf-8")
