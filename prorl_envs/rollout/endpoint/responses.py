"""OpenAI's Responses interface (https://platform.openai.com/docs/api-reference/responses and
/responses-streaming). Responses are not stored: each request contains its whole conversation, as with
`store: false`. Tools that run on OpenAI's own servers are not available to the model. Free-form tools have
one argument, a text.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from prorl_envs.env.base import Message
from prorl_envs.rollout.endpoint.chat import call_of, openai_error, sse
from prorl_envs.rollout.endpoint.types import (
    EndpointAnswer,
    EndpointRequest,
    RefusalReason,
    RequestRefused,
    conversation,
    objects,
    parse_body,
    text_field,
    text_of,
    token_limit,
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

    input: list[Any] | str
    instructions: Any = None
    tools: Any = None
    tool_choice: Any = None
    stream: Any = None
    max_output_tokens: Any = None
    previous_response_id: Any = None
    background: Any = None
    model: Any = None


class Responses:
    """Implements `Shape`."""

    def read(self, data: bytes) -> EndpointRequest:
        body = parse_body(data, _Request)
        if body.previous_response_id is not None:
            raise RequestRefused(
                RefusalReason.INVALID,
                "previous_response_id: responses are not stored; send the whole conversation",
            )
        if body.background is True:
            raise RequestRefused(RefusalReason.INVALID, "background: not supported")
        items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
        all_items = [{"role": "system", "content": body.instructions}, *items]
        messages = filter(None, map(_read, objects(all_items, "input")))
        return EndpointRequest(
            messages=conversation(messages, joins=True),
            tools=() if body.tool_choice == "none" else _tools(body.tools),
            max_tokens=token_limit(max_output_tokens=body.max_output_tokens),
            stream=body.stream is True,
            model=str(body.model or "")[:200],
            size=len(data),
        )

    def write(self, answer: EndpointAnswer, request: EndpointRequest) -> JsonObject:
        return _response(_head(request, answer.number), answer, _items(answer, _free(request)))

    def stream(self, request: EndpointRequest, number: int) -> "ResponsesStream":
        return ResponsesStream(_head(request, number), number, _free(request))

    def error(self, refusal: RequestRefused) -> JsonObject:
        return openai_error(refusal)


class ResponsesStream:
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
        return self._event("response.created", response=self._head) + self._event(
            "response.in_progress", response=self._head
        )

    def reasoning(self, text: str) -> bytes:
        events = self._switch("reasoning")
        self._text += text
        return events + self._event("response.reasoning_text.delta", delta=text, **self._place())

    def content(self, text: str) -> bytes:
        events = self._switch("message")
        self._text += text
        return events + self._event("response.output_text.delta", delta=text, logprobs=[], **self._place())

    def end(self, answer: EndpointAnswer) -> bytes:
        events = b"" if self._has_output(answer) else self._switch("message")
        events += self._close()
        for index, call in enumerate(answer.turn.tool_calls):
            events += self._call(_call_item(call, self._number, index, self._free))
        response = _response(self._head, answer, self._done)
        return events + self._event(f"response.{response['status']}", response=response)

    def fail(self, refusal: RequestRefused) -> bytes:
        error = {"code": "server_error", "message": refusal.message}
        failed = {**self._head, "status": "failed", "error": error, "output": self._done}
        return self._event("response.failed", response=failed)

    def _has_output(self, answer: EndpointAnswer) -> bool:
        """Return True if the stream has a message or will have a tool call. Otherwise it needs a message."""
        items = self._done if self._open is None else [*self._done, self._open]
        return any(item["type"] == "message" for item in items) or bool(answer.turn.tool_calls)

    def _call(self, item: JsonObject) -> bytes:
        key, kind = ("arguments", "function_call_arguments")
        if item["type"] == "custom_tool_call":
            key, kind = ("input", "custom_tool_call_input")
        place = {"item_id": item["id"], "output_index": len(self._done)}
        started = {**item, key: "", "status": "in_progress"}
        events = self._event("response.output_item.added", output_index=len(self._done), item=started)
        events += self._event(f"response.{kind}.delta", delta=item[key], **place)
        name = {"name": item["name"]} if key == "arguments" else {}
        events += self._event(f"response.{kind}.done", **{key: item[key]}, **name, **place)
        events += self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        return events

    def _switch(self, kind: str) -> bytes:
        """Start an output item, unless an item of the same kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        events = self._close()
        index = len(self._done)
        self._open = _text_item(kind, "", self._number, status="in_progress")
        part = self._open["content"][0]
        events += self._event(
            "response.output_item.added", output_index=index, item={**self._open, "content": []}
        )
        return events + self._event("response.content_part.added", part=part, **self._place())

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        kind, text = self._open["type"], self._text
        item = _text_item(kind, text, self._number)
        place = self._place()
        if kind == "message":
            events = self._event("response.output_text.done", text=text, logprobs=[], **place)
        else:
            events = self._event("response.reasoning_text.done", text=text, **place)
        events += self._event("response.content_part.done", part=item["content"][0], **place)
        events += self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._open, self._text = None, ""
        return events

    def _place(self) -> JsonObject:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._done), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return sse({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)


def _tools(items: Any) -> Sequence[ToolSpec]:
    tools = []
    for item in () if items is None else objects(items, "tools"):
        if item.get("type") == "function":
            tools.append(tool(item.get("name"), item.get("description"), item.get("parameters")))
        elif item.get("type") == "custom":
            tools.append(tool(item.get("name"), item.get("description"), _FREE))
    return tools


def _read(item: Mapping[str, Any]) -> Message | None:
    """Return an item of a conversation as a message or as a part of one; None for an item without content."""
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
            return _called(
                text_field(item, "call_id", kind), text_field(item, "name", kind), item.get("arguments")
            )
        case "custom_tool_call":
            arguments = {FREE_TEXT: text_field(item, "input", kind)}
            return _called(text_field(item, "call_id", kind), text_field(item, "name", kind), arguments)
        case "function_call_output" | "custom_tool_call_output":
            output = text_of(item.get("output"), kind)
            return {"role": "tool", "tool_call_id": text_field(item, "call_id", kind), "content": output}
        case "reasoning":
            return None  # the recorded answer contains it
        case _:
            raise RequestRefused(
                RefusalReason.INVALID, f"input: items of type {str(kind)[:50]!r} are not supported"
            )


def _called(id_: str, name: str, arguments: Any) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [call_of(id_, name, arguments)]}


def _free(request: EndpointRequest) -> frozenset[str]:
    """Return the names of free-form tools."""
    return frozenset(tool.name for tool in request.tools if tool.parameters is _FREE)


def _items(answer: EndpointAnswer, free: frozenset[str]) -> list[JsonObject]:
    turn, number = answer.turn, answer.number
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


def _head(request: EndpointRequest, number: int) -> JsonObject:
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
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


def _response(head: JsonObject, answer: EndpointAnswer, items: list[JsonObject]) -> JsonObject:
    cut = answer.finish == "length"
    return {
        **head,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }
