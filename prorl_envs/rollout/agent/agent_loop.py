"""Agent loop on tokens: model calls and tool calls in turn.

The prompt is rendered once. Then each turn appends the sampled tokens, unchanged, and the observations, which
are rendered separately. If the chat template may rewrite the history, a rewrite forks the ledger. The loop
parses sampled text to find tool calls, and never tokenises this text again.
"""

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypedDict, Unpack

from prorl_envs.clock import Clock
from prorl_envs.env.base import Environment, Message, Prompt
from prorl_envs.errors import EnvironmentFault, ModelError
from prorl_envs.model.routing.pause_gate import ActiveTimeout, HeldTime
from prorl_envs.model.tokens.continuation import Append, Fork, next_prompt
from prorl_envs.model.tokens.rendering import LONG, TemplateRenderer
from prorl_envs.model.types import (
    AssistantTurn,
    Conversation,
    ModelClient,
    Reasoning,
    RoutedModelClient,
    Sampled,
    Sampling,
)
from prorl_envs.rollout.agent import loop_limits, tracing
from prorl_envs.rollout.agent.fair_yield import LoopFairness
from prorl_envs.rollout.agent.token_ledger import Ledger
from prorl_envs.rollout.api.types import AgentLimits, StopReason, Trajectory
from prorl_envs.strict_json import encodable
from prorl_envs.tools.types import ToolCall, ToolSpec

_CUT = (
    "Your answer was cut off after {tokens} tokens, before a tool call was complete. "
    "Be brief and call one tool."
)

#: Number of ids at the end of a prompt that are enough to see whether the reasoning starts in the prompt.
PROMPT_END = 16


class Record(Protocol):
    """Token record of a conversation: the part of `TokenLedger` and of the endpoint's recording that a result
    needs."""

    def __len__(self) -> int: ...

    @property
    def forks(self) -> Sequence[Trajectory]: ...

    @property
    def unfinished_answers(self) -> Sequence[Trajectory]: ...

    @property
    def turns(self) -> int: ...

    @property
    def model_s(self) -> float: ...

    @property
    def tools_s(self) -> float: ...

    def trajectory(self) -> Trajectory | None: ...


@dataclass(slots=True)
class Transcript:
    """Conversation so far. It outlives the loop, so that an interrupted episode still has its transcript.

    Args:
        messages: the conversation as chat messages.
        ledger: the conversation as tokens; None before the prompt is rendered.
        tools: available tools, if a harness has tools of its own.
        held: time for which turns were held while weights changed. Deadlines do not count this time.
    """

    messages: list[Message] = field(default_factory=list)
    ledger: Record | None = None
    tools: Sequence[ToolSpec] | None = None
    held: HeldTime = field(default_factory=HeldTime)


@dataclass(frozen=True, slots=True)
class TurnJournal:
    """Journal of the sampled answers of a job. A further attempt takes them from here, as long as the model
    reads the same tokens, and samples only what follows.

    Args:
        answers: answers of earlier attempts by `Ledger.history` before the answer.
        note: stores a new answer under its history.
    """

    answers: Mapping[bytes, Sampled]
    note: Callable[[bytes, Sampled], None]


class EpisodeSettings(TypedDict):
    """Settings of an episode, for the agent loop and for a harness.

    limits: limits of the episode, such as turns, tokens of the context and seconds.
    sampling: sampling parameters of each turn; `max_tokens` is reduced to the room in the context.
    session: session name; the model servers treat its calls as one conversation.
    """

    limits: AgentLimits
    sampling: Sampling
    session: str


@dataclass(slots=True)
class Agent:
    """Runner of episodes with one model.

    Args:
        renderer: the model's tokenizer and chat template.
        model: client of the model servers.
        clock: measures the calls and the time limit.
        reasoning: whether later prompts keep the reasoning of earlier turns.
    """

    renderer: TemplateRenderer
    model: ModelClient
    clock: Clock
    reasoning: Reasoning = "keep"
    #: `model` if it is a routed client; cached, since the protocol check is slow.
    pooled: RoutedModelClient | None = field(init=False, repr=False)
    #: Passed before each computation of an episode that takes longer than a request to the service.
    fairness: LoopFairness = field(default_factory=LoopFairness, init=False, repr=False)

    def __post_init__(self) -> None:
        self.pooled = self.model if isinstance(self.model, RoutedModelClient) else None

    async def begin(
        self,
        environment: Environment[Any],
        prompt: Prompt,
        transcript: Transcript,
        **settings: Unpack[EpisodeSettings],
    ) -> "AgentLoop":
        """Return a loop that has rendered its prompt and taken no turn.

        Args:
            environment: an initialised environment; the loop calls its tools.
            prompt: the return value of `init`.
            transcript: filled while the loop runs.
            settings: see `EpisodeSettings`.
        """
        render = partial(self.renderer.prompt, prompt.messages, prompt.tools)
        ids = await run_in_thread_if_long(_characters(prompt.messages), render)
        return AgentLoop(self, environment, prompt, ids, transcript, **settings)

    def forget(self, session: str) -> None:
        """Let the router forget a finished conversation and the model server that it was assigned to."""
        if self.pooled is not None:
            self.pooled.forget(session)


class AgentLoop:
    """One run of the agent loop.

    Callers either run all turns with `finish`, or one at a time: `turn` samples from the model, `answer`
    takes a caller's answer. The time limit starts with the constructor, and stops from `sleep` to `wake`.

    Args: those of `Agent.begin`, and `prompt_ids`, the rendered prompt.

    Attributes:
        journal: journal of the sampled answers, or None.
    """

    journal: TurnJournal | None = None

    def __init__(
        self,
        agent: Agent,
        environment: Environment[Any],
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
        self.repeats = loop_limits.RepeatDetector(limits.max_repeats)
        self.warned = False
        self.tools = prompt.tools
        self.tool_names = frozenset(tool.name for tool in prompt.tools)
        self.context = list(prompt_ids)
        self.ledger = Ledger(self.context)
        self.transcript = transcript
        transcript.messages.extend(prompt.messages)
        transcript.ledger = self.ledger

    def sleep(self) -> None:
        """Suspend the time limit, while the caller works."""
        self.seconds_left_asleep = self.seconds_left

    def wake(self) -> None:
        """Resume the time limit."""
        self.ends_at = (
            self.agent.clock.monotonic() + self.seconds_left_asleep - self.transcript.held.seconds()
        )

    def branch(
        self,
        environment: Environment[Any],
        transcript: Transcript,
        ledger: Ledger,
        settings: EpisodeSettings,
    ) -> "AgentLoop":
        """Return a loop that goes on from here in another environment, asleep as this one.

        Args:
            transcript: an empty transcript, which receives the messages so far.
            ledger: copy or branch of this loop's ledger.
            settings: settings of the new loop, with the same limits.
        """
        loop = copy.copy(self)
        loop.environment, loop.transcript, loop.ledger = environment, transcript, ledger
        loop.sampling, loop.session = settings["sampling"], settings["session"]
        loop.context, loop.repeats = list(self.context), copy.deepcopy(self.repeats)
        transcript.messages.extend(self.transcript.messages)
        transcript.ledger = ledger
        return loop

    @property
    def room(self) -> int:
        """Number of tokens by which the context may still grow."""
        return self.limits.max_tokens - len(self.context)

    @property
    def seconds_left(self) -> float:
        return self.ends_at + self.transcript.held.seconds() - self.agent.clock.monotonic()

    async def finish(self) -> StopReason:
        """Take turns until the loop stops."""
        while (reason := await self.turn()) is None:
            pass
        return reason

    async def replay(self, answers: Mapping[bytes, Sampled], turns: int) -> StopReason | None:
        """Take over the first `turns` turns of another episode, as long as the tool calls have the same
        results. Its ids are not trained on.

        Args:
            answers: its answers by `Ledger.history`.

        Returns:
            The reason why the loop stops, or None to continue.

        Raises:
            EnvironmentFault: the other episode has another prompt.
        """
        reason = None
        while reason is None and self.ledger.turns < turns:
            if (answer := answers.get(self.ledger.history())) is None:
                break
            reason = await self.answer(answer)
        if not self.ledger.turns:
            raise EnvironmentFault("the episode with whose turns this one starts has another prompt")
        self.ledger = self.transcript.ledger = self.ledger.branch()
        return reason

    async def until(self, turns: int) -> StopReason | None:
        """Take turns until there are `turns`; return why the loop stopped before, or None."""
        reason = None
        while reason is None and self.ledger.turns < turns:
            reason = await self.turn()
        return reason

    async def turn(self) -> StopReason | None:
        """Run one model call and its tool calls; return why the loop stops, or None to continue."""
        if reason := self.exhausted():
            return reason
        history = self.ledger.history() if self.journal else b""
        if self.journal and (known := self.journal.answers.get(history)):
            return await self.answer(known)
        sampled = await self._sample()
        if sampled is None:
            return StopReason.TIME_LIMIT
        if self.journal:
            self.journal.note(history, sampled)
        return await self._process_answer(sampled)

    async def answer(self, sampled: Sampled) -> StopReason | None:
        """Append an answer that was sampled before from the current context, and run its tool calls.

        Args:
            sampled: the answer, with at most `room` tokens.

        Returns:
            The reason why the loop stops, or None to continue.
        """
        self.ledger.sent(self.context)
        self.ledger.sampled(sampled, 0.0)
        self.context.extend(sampled.ids)
        return await self._process_answer(sampled)

    def exhausted(self) -> StopReason | None:
        """Return why the limits allow no further turn, or None if they allow one."""
        if self.ledger.turns >= self.limits.max_turns:
            return StopReason.TURN_LIMIT
        return StopReason.TOKEN_LIMIT if self.room < 1 else None

    async def _process_answer(self, sampled: Sampled) -> StopReason | None:
        """Parse an answer and run its tool calls."""
        await self.agent.fairness.through()
        prompt_length = len(self.context) - len(sampled.ids)
        prompt_end = self.context[max(0, prompt_length - PROMPT_END) : prompt_length]
        answer = self.agent.renderer.parse(sampled.ids, self.tools, prompt_ids=prompt_end)
        self.transcript.messages.append(assistant_message(self.agent.renderer, answer, sampled))
        if reason := self._stop_without_calls(answer, sampled):
            return reason
        observations = await self.act(answer.tool_calls)
        if isinstance(observations, StopReason):
            return observations
        if self.repeats.noticed(answer.tool_calls, observations):
            return StopReason.LOOP
        observations.extend({"role": "user", "content": note} for note in self._notes(answer, sampled))
        return await self._observe(sampled, observations)

    async def _sample(self) -> Sampled | None:
        """Sample one turn. Return None if the time limit was reached first.

        Raises:
            ModelError: the answer is invalid. Or the time limit was reached before the first answer of the
                episode, or in a single call that took more than half of the time limit.
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
            raise ModelError(  # slow servers are not the policy's fault, so the episode is not graded
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

    def _stop_without_calls(self, answer: AssistantTurn, sampled: Sampled) -> StopReason | None:
        """Return why an answer without a readable tool call stops the loop, or None."""
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
        """Return notes to the model about calls that could not be read."""
        if answer.malformed or answer.tool_calls or sampled.finish_reason != "length":
            return answer.malformed
        return (_CUT.format(tokens=len(sampled.ids)),)

    async def act(self, calls: Sequence[ToolCall]) -> list[Message] | StopReason:
        """Run the calls in order; return the observations, or why the loop stops."""
        observations: list[Message] = []
        for call in calls:
            if self.seconds_left <= 0:
                return StopReason.TIME_LIMIT
            started = self.agent.clock.monotonic()
            timeout_s = min(self.limits.tool_timeout_s, self.seconds_left)
            with tracing.tool_call(call, known=call.name in self.tool_names) as span:
                result = await self.environment.call(call, timeout_s=timeout_s)
                tracing.note_tool(span, result)
            self.ledger.tools_took(self.agent.clock.monotonic() - started, failed=result.failed)
            if call.name == self.environment.finish_tool and result.ok:
                return StopReason.FINISHED
            text = encodable(
                loop_limits.cut(result.text, self.limits.max_observation_chars or len(result.text))
            )
            observations.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})
        return observations

    async def _observe(self, sampled: Sampled, observations: Sequence[Message]) -> StopReason | None:
        """Append the observations to the context, unless they leave no room for an answer."""
        await self.agent.fairness.through()
        step = await self._next_prompt(sampled, observations)
        reserve = self.limits.reserve_tokens
        if reserve and not self.warned and self._room_after(step) <= reserve:
            step, observations = await self._cut_to_reserve(sampled, observations)
        if self._room_after(step) < 1:
            return StopReason.TOKEN_LIMIT
        if isinstance(step, Fork):
            self.ledger.fork(step.ids)
            self.context = list(step.ids)
        else:
            self.ledger.observed(step.ids)
            self.context.extend(step.ids)
        self.transcript.messages.extend(observations)
        return None

    async def _next_prompt(self, sampled: Sampled, observations: Sequence[Message]) -> Append | Fork:
        messages = [*self.transcript.messages, *observations]
        agent = self.agent
        rendered = observations if agent.reasoning == "keep" else messages
        return await run_in_thread_if_long(
            _characters(rendered),
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

    def _room_after(self, step: Append | Fork) -> int:
        """Return the number of tokens by which the context may grow after this step."""
        return (self.limits.max_tokens if isinstance(step, Fork) else self.room) - len(step.ids)

    async def _cut_to_reserve(
        self, sampled: Sampled, observations: Sequence[Message]
    ) -> tuple[Append | Fork, list[Message]]:
        """Add the low-budget warning, and cut the observations until `reserve_tokens` are free or the
        observations have their shortest length."""
        self.warned = True
        warning = loop_limits.low_budget_warning(self.limits.reserve_tokens)
        messages = [*observations, warning]
        step = await self._next_prompt(sampled, messages)
        for size in loop_limits.cut_sizes(observations):
            if self._room_after(step) >= self.limits.reserve_tokens:
                break
            messages = [*loop_limits.cut_all(observations, size), warning]
            step = await self._next_prompt(sampled, messages)
        return step, messages


def _characters(messages: Sequence[Message]) -> int:
    return sum(len(message.get("content") or "") for message in messages)


async def run_in_thread_if_long[T](characters: int, work: Callable[[], T]) -> T:
    """Run `work`, which parses or tokenises this number of characters; in a thread if it takes
    milliseconds."""
    return work() if characters < LONG else await asyncio.to_thread(work)


def check_sampled(sampled: Sampled, tokens: int) -> None:
    """Check an answer to a request for at most `tokens` tokens.

    Raises:
        ModelError: the answer is too long, was aborted, or has too few or too many log-probabilities.
    """
    if len(sampled.ids) != len(sampled.logprobs):
        raise ModelError(
            f"the model server sent {len(sampled.logprobs)} log-probabilities for {len(sampled.ids)} tokens"
        )
    if len(sampled.ids) > tokens:
        raise ModelError(f"the model server sampled {len(sampled.ids)} tokens; the limit was {tokens}")
    if sampled.finish_reason == "abort":
        raise ModelError("the model server aborted the answer")


def assistant_message(renderer: TemplateRenderer, answer: AssistantTurn, sampled: Sampled) -> Message:
    """Return an answer as a message."""
    if answer.malformed:  # the sampled text contains more than its readable part
        return {
            "role": "assistant",
            "content": encodable(renderer.decode(renderer.without_stop(sampled.ids))),
        }
    message: dict[str, Any] = {"role": "assistant", "content": encodable(answer.content)}
    if answer.reasoning:
        message["reasoning_content"] = encodable(answer.reasoning)
    if answer.tool_calls:
        message["tool_calls"] = [call.to_openai() for call in answer.tool_calls]
    return message
