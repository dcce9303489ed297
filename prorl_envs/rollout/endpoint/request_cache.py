"""Cache of parsed requests, which grow with each call.

A request carries its whole history, most of which was parsed before. So its items are compared byte by byte
with those of earlier requests, at memory speed, and a common prefix is not parsed again. Its messages are the
same objects, and their keys (`conversation_key`) are known.
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

#: Bytes or characters above which the new part of a request is parsed in a thread.
LONG = 200_000
#: Conversations in the cache, and the bytes of all of them.
_HISTORIES, _BYTES = 8, 32 << 20


def _value(item: bytes) -> Any:
    try:
        return msgspec.json.decode(item)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise RequestRefused(RefusalReason.INVALID, NOT_JSON) from None


@dataclass(slots=True)
class MessageList:
    """Messages as chat templates accept them: the first system messages are joined, later ones become user
    messages, and tool results contain the name of their tool.

    Args:
        joins: consecutive items of the model are joined to one message.
    """

    joins: bool = False
    messages: list[Message] = field(default_factory=list)
    #: Of each message, the first and the last item that it contains.
    began: list[int] = field(default_factory=list)
    touched: list[int] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)
    _shared: int = 0  # messages shared with other lists, which are copied before a change

    def upto(self, item: int) -> "MessageList":
        """Return a copy with the messages that contain no item from this one on."""
        kept = bisect_left(self.began, item)
        if kept and self.touched[kept - 1] >= item:
            kept -= 1
        other = MessageList(self.joins, self.messages[:kept], self.began[:kept], self.touched[:kept])
        if kept == len(self.messages):
            other._names = dict(self._names)
        else:
            for message in other.messages:
                other._name(message)
        other._shared = kept
        return other

    def add(self, message: Message, item: int) -> None:
        """Add a message; `item` is the number of its source item."""
        role = message["role"]
        at_system = len(self.messages) == 1 and self.messages[0]["role"] == "system"
        if role == "system" and self.messages and not at_system:
            role, message = "user", {**message, "role": "user"}
        self._name(message)
        if role == "tool" and (name := self._names.get(message["tool_call_id"])):
            message = {**message, "name": name}
        if (role == "system" and at_system) or (role == "assistant" and self._joins_answer):
            self._join(message, item)
            return
        self.messages.append(message)
        self.began.append(item)
        self.touched.append(item)
        self._shared = len(self.messages)

    def check_end(self) -> None:
        """Check that the last message needs an answer.

        Raises:
            RequestRefused: it does not.
        """
        last = self.messages[-1]["role"] if self.messages else "system"
        if last in ("system", "assistant"):
            raise RequestRefused(
                RefusalReason.INVALID,
                "the last message must be a user's or a tool's: answers are not begun here",
            )

    @property
    def _joins_answer(self) -> bool:
        return self.joins and bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def _name(self, message: Message) -> None:
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
        self.touched[-1] = item


@dataclass(frozen=True, slots=True, eq=False)
class _History:
    """Conversation of a request.

    Args:
        shape: interface of the request.
        items: JSON.
        dialogue: parsed messages of the items.
        keys: of its messages.
        size: bytes of all items.
    """

    shape: Shape
    items: Sequence[bytes]
    dialogue: MessageList
    keys: Sequence[bytes]
    size: int

    def common(self, items: Sequence[bytes]) -> int:
        """Return the number of equal items at the start."""
        count = 0
        for mine, other in zip(self.items, items, strict=False):
            if mine != other:
                break
            count += 1
        return count

    def grown(self, items: Sequence[bytes], common: int) -> "_History":
        """Return the history of other items with this common prefix. Changes nothing: may run in a thread.

        Raises:
            RequestRefused: an item cannot be parsed.
        """
        dialogue = self.dialogue.upto(common)
        kept = len(dialogue.messages)
        begin = dialogue.touched[-1] + 1 if kept else 0
        for number in range(begin, len(items)):
            for message in self.shape.item(_value(items[number])):
                dialogue.add(message, number)
        keys = list(self.keys[:kept])
        if kept and dialogue.touched[kept - 1] >= begin:
            keys.pop()  # the last message has grown
        for message in dialogue.messages[len(keys) :]:
            keys.append(key_of(keys[-1] if keys else b"", message))
        own = [*self.items[:common], *items[common:]]
        return _History(self.shape, own, dialogue, keys, sum(map(len, own)))


@dataclass(frozen=True, slots=True)
class _Offer:
    """Tools of a request.

    Args:
        given: JSON.
        key: key of the tools.
    """

    shape: Shape
    given: bytes
    tools: Sequence[ToolSpec]
    key: bytes


class RequestCache:
    """Parser of the requests of one rollout, with a cache of their history."""

    def __init__(self) -> None:
        self._histories: list[_History] = []  # the latest last
        self._offers: list[_Offer] = []

    async def read(self, shape: Shape, data: bytes) -> EndpointRequest:
        """Parse a request.

        Args:
            shape: of the interface.
            data: its body.

        Raises:
            RequestRefused: it is malformed, or needs an unsupported feature.
        """
        body = shape.open(data)
        offer = self._offer(shape, body.tools)
        known = [history for history in self._histories if history.shape is shape]
        common, closest = max(
            ((history.common(body.items), history) for history in reversed(known)),
            key=lambda found: found[0],
            default=(0, _History(shape, (), MessageList(shape.joins), (), 0)),
        )
        grow = partial(closest.grown, body.items, common)
        new = sum(map(len, body.items[common:]))
        history = await asyncio.to_thread(grow) if new > LONG else grow()
        history.dialogue.check_end()
        self._keep(history, instead=closest if common == len(closest.items) else None)
        return replace(
            body.asked,
            messages=history.dialogue.messages,
            keys=history.keys,
            tools=offer.tools,
            tools_key=offer.key,
            size=len(data),
        )

    def _offer(self, shape: Shape, given: bytes) -> _Offer:
        for offer in self._offers:
            if offer.given == given and offer.shape is shape:
                return offer
        tools = shape.tools(_value(given))
        offer = _Offer(shape, given, tools, key_of_tools(tools))
        self._offers = [*self._offers[1 - _HISTORIES :], offer]
        return offer

    def _keep(self, history: _History, *, instead: _History | None) -> None:
        self._histories = [known for known in self._histories if known is not instead]
        self._histories.append(history)
        while len(self._histories) > _HISTORIES or sum(known.size for known in self._histories) > _BYTES:
            self._histories.pop(0)
