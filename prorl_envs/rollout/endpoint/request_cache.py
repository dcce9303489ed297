"""Cache of parsed requests.

A request contains the whole history of its conversation, and most of it was parsed for an earlier request. So
the items of a request are compared byte by byte with those of earlier requests, which is fast, and a common
prefix is not parsed again. Its messages are the same objects, and their keys (`conversation_key`) are reused.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from prorl_envs.env.base import Message
from prorl_envs.rollout.endpoint.conversation_key import key_of, key_of_tools
from prorl_envs.rollout.endpoint.types import NOT_JSON, EndpointRequest, RefusalReason, RequestRefused, Shape
from prorl_envs.tools.types import ToolSpec

#: Number of bytes above which the new part of a request is parsed in a thread.
LONG = 200_000
#: Maximum number of conversations in the cache, and of bytes of all conversations.
_MAX_HISTORIES, _MAX_BYTES = 8, 32 << 20


def _value(item: bytes) -> Any:
    try:
        return msgspec.json.decode(item)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise RequestRefused(RefusalReason.INVALID, NOT_JSON) from None


@dataclass(slots=True)
class MessageList:
    """Messages in a form that chat templates accept: system messages at the start are joined, later ones
    become user messages, and tool results contain the name of their tool.

    Args:
        joins: True if consecutive items of the model are joined to one message.

    Attributes:
        first_items, last_items: for each message, the numbers of the first and the last item in it.
    """

    joins: bool = False
    messages: list[Message] = field(default_factory=list)
    first_items: list[int] = field(default_factory=list)
    last_items: list[int] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)  # tool names by call id
    _shared: int = 0  # number of messages in common with other lists; they are copied before a change

    def before(self, item: int) -> "MessageList":
        """Return a copy with only the messages whose items are all before this item."""
        count = bisect_left(self.first_items, item)
        if count and self.last_items[count - 1] >= item:
            count -= 1
        copy = MessageList(
            self.joins, self.messages[:count], self.first_items[:count], self.last_items[:count]
        )
        if count == len(self.messages):
            copy._names = dict(self._names)
        else:
            for message in copy.messages:
                copy._note_call_names(message)
        copy._shared = count
        return copy

    def add(self, message: Message, item: int) -> None:
        """Add a message. `item` is the number of the item that contains it."""
        role = message["role"]
        at_system = len(self.messages) == 1 and self.messages[0]["role"] == "system"
        if role == "system" and self.messages and not at_system:
            role, message = "user", {**message, "role": "user"}
        self._note_call_names(message)
        if role == "tool" and (name := self._names.get(message["tool_call_id"])):
            message = {**message, "name": name}
        if (role == "system" and at_system) or (role == "assistant" and self._joins_answer):
            self._join(message, item)
            return
        self.messages.append(message)
        self.first_items.append(item)
        self.last_items.append(item)
        self._shared = len(self.messages)

    def check_end(self) -> None:
        """Check that the last message needs an answer.

        Raises:
            RequestRefused: the last message is the model's or a system message.
        """
        last = self.messages[-1]["role"] if self.messages else "system"
        if last in ("system", "assistant"):
            raise RequestRefused(
                RefusalReason.INVALID,
                "the last message must be a user's or a tool's; prefilled answers are not supported",
            )

    @property
    def _joins_answer(self) -> bool:
        return self.joins and bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def _note_call_names(self, message: Message) -> None:
        for call in message.get("tool_calls", ()):
            self._names[call["id"]] = call["function"]["name"]

    def _join(self, message: Message, item: int) -> None:
        last = self.messages[-1]
        if len(self.messages) <= self._shared:
            last = self.messages[-1] = {**last}
            self._shared = len(self.messages) - 1
            if "tool_calls" in last:
                last["tool_calls"] = list(last["tool_calls"])
        between = "\n\n" if message["role"] == "system" else ""
        last["content"] += between + message["content"]
        if calls := message.get("tool_calls"):
            last.setdefault("tool_calls", []).extend(calls)
        self.last_items[-1] = item


@dataclass(frozen=True, slots=True, eq=False)
class _History:
    """Conversation of a request.

    Args:
        items: items of the request, each as JSON.
        parsed: parsed messages of the items; `keys`: their keys.
        size: number of bytes of all items.
    """

    shape: Shape
    items: Sequence[bytes]
    parsed: MessageList
    keys: Sequence[bytes]
    size: int

    def common(self, items: Sequence[bytes]) -> int:
        """Return the number of equal items at the start."""
        count = 0
        for known_item, item in zip(self.items, items, strict=False):
            if known_item != item:
                break
            count += 1
        return count

    def extended(self, items: Sequence[bytes], common: int) -> "_History":
        """Return the history of a further request. Changes nothing, so it may run in a thread.

        Args:
            items: items of the further request.
            common: number of items that are equal to the first items of this history.

        Raises:
            RequestRefused: an item cannot be parsed.
        """
        parsed = self.parsed.before(common)
        count = len(parsed.messages)
        begin = parsed.last_items[-1] + 1 if count else 0
        for number in range(begin, len(items)):
            for message in self.shape.item(_value(items[number])):
                parsed.add(message, number)
        keys = list(self.keys[:count])
        if count and parsed.last_items[count - 1] >= begin:
            keys.pop()  # items were joined to the last message, so its key has changed
        for message in parsed.messages[len(keys) :]:
            keys.append(key_of(keys[-1] if keys else b"", message))
        # Items of the common prefix are kept as the same objects, so that they are in memory once.
        all_items = [*self.items[:common], *items[common:]]
        return _History(self.shape, all_items, parsed, keys, sum(map(len, all_items)))


@dataclass(frozen=True, slots=True)
class _ToolsEntry:
    """Tools of a request.

    Args:
        raw_tools: the tools as JSON.
        key: key of the tools.
    """

    shape: Shape
    raw_tools: bytes
    tools: Sequence[ToolSpec]
    key: bytes


class RequestCache:
    """Parser of the requests of one rollout, with a cache of their conversations."""

    def __init__(self) -> None:
        self._histories: list[_History] = []  # the last used one is at the end
        self._tools: list[_ToolsEntry] = []

    async def read(self, shape: Shape, data: bytes) -> EndpointRequest:
        """Parse a request.

        Args:
            shape: interface of the request.
            data: body of the request.

        Raises:
            RequestRefused: the request is malformed, or needs an unsupported feature.
        """
        body = shape.open(data)
        entry = self._parse_tools(shape, body.tools)
        known = [history for history in self._histories if history.shape is shape]
        common, closest = max(
            ((history.common(body.items), history) for history in reversed(known)),
            key=lambda found: found[0],
            default=(0, _History(shape, (), MessageList(shape.joins), (), 0)),
        )
        extend = partial(closest.extended, body.items, common)
        new = sum(map(len, body.items[common:]))
        history = await asyncio.to_thread(extend) if new > LONG else extend()
        history.parsed.check_end()
        self._add(history, replaced=closest if common == len(closest.items) else None)
        return replace(
            body.request,
            messages=history.parsed.messages,
            keys=history.keys,
            tools=entry.tools,
            tools_key=entry.key,
            size=len(data),
        )

    def _parse_tools(self, shape: Shape, raw_tools: bytes) -> _ToolsEntry:
        for entry in self._tools:
            if entry.raw_tools == raw_tools and entry.shape is shape:
                return entry
        tools = shape.tools(_value(raw_tools))
        entry = _ToolsEntry(shape, raw_tools, tools, key_of_tools(tools))
        self._tools = [*self._tools[1 - _MAX_HISTORIES :], entry]
        return entry

    def _add(self, history: _History, *, replaced: _History | None) -> None:
        self._histories = [known for known in self._histories if known is not replaced]
        self._histories.append(history)
        while (
            len(self._histories) > _MAX_HISTORIES or sum(known.size for known in self._histories) > _MAX_BYTES
        ):
            self._histories.pop(0)
