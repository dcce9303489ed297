"""Recording of the requests and answers of a model endpoint, as rows of the token ledger.

Each answer defines a state: the ids of the conversation up to the end of the answer. A request whose first
messages are those of a state, including its answer, continues with the ids of the state. New messages are
appended as in the agent loop. Sampled tokens are never tokenised again. A request that rewrites its history
continues from the latest state that still matches; its other messages are context. So the rows form a tree.
An answer is trained on in one row only; in rows that branch off after it, it is context.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from prorl_envs.env.base import Message
from prorl_envs.errors import InputError
from prorl_envs.model.tokens.continuation import Append, next_prompt
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import AssistantTurn, Reasoning, Sampled
from prorl_envs.rollout.agent.agent_loop import PROMPT_END, assistant_message
from prorl_envs.rollout.agent.token_ledger import Ledger
from prorl_envs.rollout.api.types import Trajectory
from prorl_envs.tools.types import ToolCall, ToolSpec


@dataclass(slots=True, eq=False)
class _Row:
    ledger: Ledger
    latest: int  # number of the row's last answer
    parent: "_Row | None" = None
    shared: int = 0  # number of ids in common with the parent


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """Conversation up to the end of an answer."""

    row: _Row
    length: int  # number of ids up to the end of the answer, which are the first of the row
    sampled: Sampled
    messages: Sequence[Message]
    ended_at: float

    @property
    def context(self) -> list[int]:
        return self.row.ledger.ids[: self.length]


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """Prompt that is ready for sampling.

    Args:
        ids: the whole context.
        messages: messages of the context. Recorded answers replace those of the request.
        tools: available tools.
        tools_key, key: keys of the tools and of the conversation.
        parent: the state from which the request continues; None for a new conversation.
        shared: number of ids in common with the state.
    """

    ids: list[int]
    messages: Sequence[Message]
    tools: Sequence[ToolSpec]
    tools_key: bytes
    key: bytes
    parent: _State | None
    shared: int = 0


@dataclass(slots=True)
class Recording:
    """Conversations of one rollout. Implements `agent_loop.Record`.

    Args:
        renderer: tokenizer and chat template of the model.
        reasoning: whether later prompts keep the reasoning of earlier turns.

    Attributes:
        turns: number of recorded answers, including unfinished ones.
    """

    renderer: TemplateRenderer
    reasoning: Reasoning = "keep"
    turns: int = field(default=0, init=False)
    _rows: list[_Row] = field(default_factory=list, init=False)
    _unfinished: list[_Row] = field(default_factory=list, init=False)
    _states: dict[bytes, _State] = field(default_factory=dict, init=False)
    _call_ids: dict[str, str] = field(default_factory=dict, init=False)

    # Requests and answers.

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Pending:
        """Return the prompt of a request. Changes nothing, so it may run in a thread.

        Raises:
            InputError: the chat template refuses the conversation.
        """
        keys, tools_key = keys_of(messages), key_of_tools(tools)
        for index, state in self._recorded_answers(messages, keys, tools_key):
            conversation = [*state.messages, *map(self._with_model_ids, messages[index + 1 :])]
            known = len(state.messages)
            if (found := self._continue_state(state, conversation, known, tools)) is not None:
                return Pending(found[0], conversation, tools, tools_key, keys[-1], state, found[1])
        conversation = [self._with_model_ids(message) for message in messages]
        return Pending(
            self.renderer.prompt(conversation, tools), conversation, tools, tools_key, keys[-1], None
        )

    def _recorded_answers(
        self, messages: Sequence[Message], keys: Sequence[bytes], tools_key: bytes
    ) -> Iterator[tuple[int, _State]]:
        """Yield the index and state of each recorded answer in the conversation, the last answer first."""
        for index in range(len(messages) - 2, -1, -1):
            if messages[index]["role"] == "assistant" and (
                state := self._states.get(tools_key + keys[index])
            ):
                yield index, state

    def record_answer(
        self, pending: Pending, sampled: Sampled, *, asked_at: float, now: float
    ) -> tuple[AssistantTurn, Sequence[Message]]:
        """Record an answer.

        Args:
            pending: the prompt.
            sampled: the answer.
            asked_at, now: time of the request and of the answer, in monotonic seconds.

        Returns:
            The parsed answer, with tool call ids that are unique in the rollout, and the whole conversation.
        """
        number, self.turns = self.turns, self.turns + 1
        row = self._row_for(pending, number, asked_at)
        row.ledger.sent(pending.ids)
        row.ledger.sampled(sampled, now - asked_at)
        row.latest = number
        turn = self.renderer.parse(sampled.ids, pending.tools, prompt_ids=pending.ids[-PROMPT_END:])
        message = assistant_message(self.renderer, turn, sampled)
        if turn.malformed and turn.tool_calls:
            message = {**message, "tool_calls": [call.to_openai() for call in turn.tool_calls]}
        messages = [*pending.messages, message]
        key = pending.tools_key + key_of(pending.key, message)
        self._states[key] = _State(row, len(row.ledger), sampled, messages, now)
        return self._for_harness(turn, message, number), messages

    def record_unfinished(self, pending: Pending, sampled: Sampled, *, asked_at: float, now: float) -> None:
        """Record the sampled part of an answer whose client did not wait for it.

        Args: see `record_answer`; the answer may be incomplete.
        """
        self.turns += 1
        row = _Row(Ledger(pending.ids), 0, pending.parent.row if pending.parent else None, pending.shared)
        row.ledger.sent(pending.ids)
        row.ledger.sampled(sampled, now - asked_at)
        self._unfinished.append(row)

    def _row_for(self, pending: Pending, number: int, asked_at: float) -> _Row:
        """Return a row that ends with the prompt: the parent's if the prompt continues it, else a new one."""
        parent = pending.parent
        if parent is not None and pending.shared == parent.length == len(parent.row.ledger):
            parent.row.ledger.tools_took(max(asked_at - parent.ended_at, 0.0))
            parent.row.ledger.observed(pending.ids[pending.shared :])
            return parent.row
        row = _Row(Ledger(pending.ids), number, parent.row if parent else None, pending.shared)
        self._rows.append(row)
        return row

    def _continue_state(
        self, state: _State, messages: Sequence[Message], known: int, tools: Sequence[ToolSpec]
    ) -> tuple[list[int], int] | None:
        """Return the context of a state with new messages appended, and the number of ids that it has in
        common with the state. Return None if the chat template cannot render the new messages. The first
        `known` of the messages are those of the state."""
        ids, new = state.context, messages[known:]
        try:
            if all(message["role"] != "assistant" for message in new):
                step = next_prompt(
                    self.renderer, self.reasoning, ids, state.sampled, messages, len(new), tools
                )
                if not isinstance(step, Append):
                    return step.ids, 0
                ids.extend(step.ids)
            else:
                self._append_rewritten(ids, state.sampled, new)
        except InputError:
            return None
        return ids, state.length

    def _append_rewritten(self, context: list[int], last: Sampled, new: Sequence[Message]) -> None:
        """Append messages to a context. They contain answers that are not recorded, so these are rendered."""
        observations: list[Message] = []
        for message in new:
            if message["role"] != "assistant":
                observations.append(message)
                continue
            ids = self.renderer.assistant(message)
            context.extend(self.renderer.bridge(last, observations) + ids)
            last, observations = Sampled(tuple(ids), (), "stop", "", ""), []
        context.extend(self.renderer.bridge(last, observations))

    def _with_model_ids(self, message: Message) -> Message:
        """Return a message with the model's own tool call ids in place of those that the harness received."""
        if message["role"] == "tool":
            id_ = message["tool_call_id"]
            return {**message, "tool_call_id": self._call_ids.get(id_, id_)}
        if calls := message.get("tool_calls"):
            return {
                **message,
                "tool_calls": [{**c, "id": self._call_ids.get(c["id"], c["id"])} for c in calls],
            }
        return message

    def _for_harness(self, turn: AssistantTurn, message: Message, number: int) -> AssistantTurn:
        """Return a turn as the harness receives it, with unique tool call ids. If a call is unreadable, the
        content is the text of the whole turn."""
        calls = []
        for index, call in enumerate(turn.tool_calls):
            id_ = f"call_{number}_{index}_{blake2b(call.id.encode(), digest_size=4).hexdigest()}"
            self._call_ids[id_] = call.id
            calls.append(ToolCall(id_, call.name, call.arguments))
        if turn.malformed:
            return AssistantTurn(message["content"], tuple(calls), turn.malformed)
        return AssistantTurn(message["content"], tuple(calls), (), message.get("reasoning_content", ""))

    # Rows for training.

    def __len__(self) -> int:
        """Return the number of tokens in all rows."""
        return sum(len(row.ledger) for row in self._rows)

    @property
    def ordered(self) -> list[_Row]:
        """Rows in the order of their last answers."""
        return sorted(self._rows, key=lambda row: row.latest)

    @property
    def forks(self) -> list[Trajectory]:
        """All rows except the row of the last answer."""
        rows = self.ordered
        return [_trajectory(row, rows) for row in rows[:-1]]

    @property
    def unfinished_answers(self) -> list[Trajectory]:
        """Context and sampled tokens of each answer whose client did not wait for it."""
        rows = self.ordered
        return [_trajectory(row, rows) for row in self._unfinished]

    def trajectory(self) -> Trajectory | None:
        """Return the row of the last answer; None before the first answer."""
        rows = self.ordered
        return _trajectory(rows[-1], rows) if rows else None

    @property
    def sampled_tokens(self) -> int:
        return sum(row.ledger.sampled_tokens for row in (*self._rows, *self._unfinished))

    @property
    def model_s(self) -> float:
        return sum(row.ledger.model_s for row in (*self._rows, *self._unfinished))

    @property
    def tools_s(self) -> float:
        return sum(row.ledger.tools_s for row in self._rows)


def _trajectory(row: _Row, rows: Sequence[_Row]) -> Trajectory:
    trajectory = row.ledger.trajectory()
    if row.parent is None or not row.shared:
        return trajectory
    return trajectory.model_copy(update={"parent": rows.index(row.parent), "shared_prefix_len": row.shared})


# Keys of conversations. Two requests have equal keys up to a message if their content is equal up to it. A
# key covers only the text and the tool calls of answers. It ignores what harnesses may change: the ids of
# calls, surrounding white space, the formatting of JSON, and the reasoning.


def keys_of(messages: Sequence[Message]) -> list[bytes]:
    """Return, for each message, the key of the conversation up to and including this message."""
    keys: list[bytes] = []
    for message in messages:
        keys.append(key_of(keys[-1] if keys else b"", message))
    return keys


def key_of(before: bytes, message: Message) -> bytes:
    """Return the key of a conversation with one more message.

    Args:
        before: key of the previous messages; empty if there are none.
        message: the new message.
    """
    role, content = message["role"], message["content"]
    if role != "assistant":
        return _digest(content, before + role.encode())
    calls = [[call["function"]["name"], _arguments(call)] for call in message.get("tool_calls") or ()]
    text_key = _digest(content.strip(), before + role.encode())
    return _digest(json.dumps(calls, sort_keys=True), text_key) if calls else text_key


def key_of_tools(tools: Sequence[ToolSpec]) -> bytes:
    """Return the key of the available tools."""
    return _digest(json.dumps([(tool.name, tool.description, tool.parameters) for tool in tools]))


def _digest(text: str, before: bytes = b"") -> bytes:
    return blake2b(before + b"\0" + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _arguments(call: Message) -> Any:
    """Return the arguments of a call: parsed if possible, since clients format JSON differently."""
    try:
        return json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return call["function"]["arguments"]
