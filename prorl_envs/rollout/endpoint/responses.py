"""OpenAI's Responses interface (https://platform.openai.com/docs/api-reference/responses and
/responses-streaming). Nothing is stored under an id: a request carries its whole conversation, as with
`store: false`. Tools that run on OpenAI's own servers are not offered to the model; free-form tools take one
text.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from prorl_envs.env.base import Message
from prorl_envs.rollout.endpoint.chat import call_of, openai_error, sse
from prorl_envs.rollout.endpoint.types import (
    NULL,
    Body,
    EndpointAnswer,
    EndpointRequest,
    RefusalReason,
    RequestRefused,
    an_object,
    as_item,
    most_tokens,
    objects,
    opened,
    text_at,
    text_of,
    tool,
)
from prorl_envs.tools.types import JsonObject, ToolCall, ToolSpec

#: Argument name of free-form tools.
FREE_TEXT = "input"
_FREE: JsonObject = {
    "type": "object",
    "properties": {FREE_TEXT: {"type": "string"}},
    "required": [FREE_TEXT],
}
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


class _Request(msgspec.Struct):
    """Fields of a request that are used."""

    input: list[msgspec.Raw] | str
    instructions: msgspec.Raw = NULL
    tools: msgspec.Raw = NULL
    tool_choice: Any = None
    stream: Any = None
    max_output_tokens: Any = None
    previous_response_id: Any = None
    background: Any = None
    model: Any = None


class Responses:
    """Implements `Shape`."""

    joins = True

    def open(self, data: bytes) -> Body:
        """See `Shape.open`."""
        body = opened(data, _Request)
        if body.previous_response_id is not None:
            raise RequestRefused(
                RefusalReason.INVALID, "previous_response_id: nothing is kept here; send the conversation"
            )
        if body.background is True:
            raise RequestRefused(RefusalReason.INVALID, "background: answers are given at once here")
        asked = EndpointRequest(
            max_tokens=most_tokens(max_output_tokens=body.max_output_tokens),
            stream=body.stream is True,
            model=str(body.model or "")[:200],
        )
        said = body.input
        given = [as_item("user", said)] if isinstance(said, str) else [bytes(item) for item in said]
        tools = b"[]" if body.tool_choice == "none" else bytes(body.tools)
        return Body([as_item("system", body.instructions), *given], tools, asked)

    def item(self, item: Any) -> Sequence[Message]:
        """See `Shape.item`."""
        message = _read(an_object(item, "input"))
        return [] if message is None else [message]

    def tools(self, given: Any) -> Sequence[ToolSpec]:
        """See `Shape.tools`."""
        return _tools(given)

    def write(self, answered: EndpointAnswer, asked: EndpointRequest) -> JsonObject:
        """See `Shape.write`."""
        return _whole(_head(asked, answered.number), answered, _items(answered, _free(asked)))

    def telling(self, asked: EndpointRequest, number: int) -> "ResponsesTelling":
        """See `Shape.telling`."""
        return ResponsesTelling(_head(asked, number), number, _free(asked))

    def error(self, refused: RequestRefused) -> JsonObject:
        """See `Shape.error`."""
        return openai_error(refused)


class ResponsesTelling:
    """Implements `AnswerStream`."""

    def __init__(self, head: JsonObject, number: int, free: frozenset[str]) -> None:
        self._head = head
        self._number = number
        self._free = free
        self._sequence = 0
        self._done: list[JsonObject] = []
        self._open: JsonObject | None = None
        self._text = ""

    def begin(self) -> bytes:
        """See `AnswerStream.begin`."""
        return self._event("response.created", response=self._head) + self._event(
            "response.in_progress", response=self._head
        )

    def reasoning(self, text: str) -> bytes:
        """See `AnswerStream.reasoning`."""
        said = self._switch("reasoning")
        self._text += text
        return said + self._event("response.reasoning_text.delta", delta=text, **self._place())

    def content(self, text: str) -> bytes:
        """See `AnswerStream.content`."""
        said = self._switch("message")
        self._text += text
        return said + self._event("response.output_text.delta", delta=text, logprobs=[], **self._place())

    def end(self, answered: EndpointAnswer) -> bytes:
        """See `AnswerStream.end`."""
        said = self._switch("message") if not self._told(answered) else b""
        said += self._close()
        for index, call in enumerate(answered.turn.tool_calls):
            said += self._call(_call_item(call, self._number, index, self._free))
        whole = _whole(self._head, answered, self._done)
        return said + self._event(f"response.{whole['status']}", response=whole)

    def fail(self, refused: RequestRefused) -> bytes:
        """See `AnswerStream.fail`."""
        error = {"code": "server_error", "message": refused.message}
        failed = {**self._head, "status": "failed", "error": error, "output": self._done}
        return self._event("response.failed", response=failed)

    def _told(self, answered: EndpointAnswer) -> bool:
        said = any(item["type"] == "message" for item in self._done)
        said = said or (self._open is not None and self._open["type"] == "message")
        return said or bool(answered.turn.tool_calls)

    def _call(self, item: JsonObject) -> bytes:
        key, kind = ("arguments", "function_call_arguments")
        if item["type"] == "custom_tool_call":
            key, kind = ("input", "custom_tool_call_input")
        place = {"item_id": item["id"], "output_index": len(self._done)}
        begun = {**item, key: "", "status": "in_progress"}
        said = self._event("response.output_item.added", output_index=len(self._done), item=begun)
        said += self._event(f"response.{kind}.delta", delta=item[key], **place)
        named = {"name": item["name"]} if key == "arguments" else {}
        said += self._event(f"response.{kind}.done", **{key: item[key]}, **named, **place)
        said += self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        return said

    def _switch(self, kind: str) -> bytes:
        """Start an output item, unless one of the same kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        said = self._close()
        index = len(self._done)
        self._open = _text_item(kind, "", self._number, status="in_progress")
        part = self._open["content"][0]
        said += self._event(
            "response.output_item.added", output_index=index, item={**self._open, "content": []}
        )
        return said + self._event("response.content_part.added", part=part, **self._place())

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        kind, text = self._open["type"], self._text
        item = _text_item(kind, text, self._number)
        place = self._place()
        if kind == "message":
            said = self._event("response.output_text.done", text=text, logprobs=[], **place)
        else:
            said = self._event("response.reasoning_text.done", text=text, **place)
        said += self._event("response.content_part.done", part=item["content"][0], **place)
        said += self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._open, self._text = None, ""
        return said

    def _place(self) -> JsonObject:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._done), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return sse({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)


def _read(item: Mapping[str, Any]) -> Message | None:
    """Convert one item of a conversation to a message or a part of one; None if it is empty."""
    kind = item.get("type", "message")
    match kind:
        case "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise RequestRefused(
                    RefusalReason.INVALID, f"input: unknown role {str(item.get('role'))[:50]!r}"
                )
            text = text_of(item.get("content"), "input")
            return {"role": role, "content": text} if text or role != "system" else None
        case "function_call":
            return _called(text_at(item, "call_id", kind), text_at(item, "name", kind), item.get("arguments"))
        case "custom_tool_call":
            arguments = {FREE_TEXT: text_at(item, "input", kind)}
            return _called(text_at(item, "call_id", kind), text_at(item, "name", kind), arguments)
        case "function_call_output" | "custom_tool_call_output":
            output = text_of(item.get("output"), kind)
            return {"role": "tool", "tool_call_id": text_at(item, "call_id", kind), "content": output}
        case "reasoning":
            return None  # the recorded answer contains it
        case _:
            raise RequestRefused(
                RefusalReason.INVALID, f"input: items of type {str(kind)[:50]!r} are not known here"
            )


def _called(id_: str, name: str, arguments: Any) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [call_of(id_, name, arguments)]}


def _tools(given: Any) -> list[ToolSpec]:
    tools = []
    for item in () if given is None else objects(given, "tools"):
        if item.get("type") == "function":
            tools.append(tool(item.get("name"), item.get("description"), item.get("parameters")))
        elif item.get("type") == "custom":
            tools.append(tool(item.get("name"), item.get("description"), _FREE))
    return tools


def _free(asked: EndpointRequest) -> frozenset[str]:
    """Return the names of free-form tools."""
    return frozenset(tool.name for tool in asked.tools if tool.parameters is _FREE)


def _items(answered: EndpointAnswer, free: frozenset[str]) -> list[JsonObject]:
    turn, number = answered.turn, answered.number
    items = []
    if turn.reasoning:
        items.append(_text_item("reasoning", turn.reasoning, number))
    if turn.content or not turn.tool_calls:
        items.append(_text_item("message", turn.content, number))
    items += [_call_item(call, number, index, free) for index, call in enumerate(turn.tool_calls)]
    return items


def _text_item(kind: str, text: str, number: int, *, status: str = "completed") -> JsonObject:
    if kind == "reasoning":
        content: JsonObject = {"type": "reasoning_text", "text": text}
        return {"id": f"rs_{number}", "type": kind, "summary": [], "content": [content], "status": status}
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{number}",
        "type": kind,
        "role": "assistant",
        "status": status,
        "content": [content],
    }


def _call_item(call: ToolCall, number: int, index: int, free: frozenset[str]) -> JsonObject:
    item: JsonObject = {"call_id": call.id, "name": call.name, "status": "completed"}
    text = call.arguments.get(FREE_TEXT)
    if call.name in free and isinstance(text, str):
        return {"id": f"ctc_{number}_{index}", "type": "custom_tool_call", **item, "input": text}
    arguments = json.dumps(call.arguments)
    return {"id": f"fc_{number}_{index}", "type": "function_call", **item, "arguments": arguments}


def _head(asked: EndpointRequest, number: int) -> JsonObject:
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": asked.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
        "usage": None,
    }


def _whole(head: JsonObject, answered: EndpointAnswer, items: list[JsonObject]) -> JsonObject:
    cut = answered.finish == "length"
    return {
        **head,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "usage": {
            "input_tokens": answered.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answered.cached_tokens},
            "output_tokens": answered.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answered.prompt_tokens + answered.completion_tokens,
        },
    }
