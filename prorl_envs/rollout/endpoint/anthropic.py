"""Anthropic's Messages interface (https://docs.anthropic.com/en/api/messages and /messages-streaming).
Signatures of thinking blocks are empty, since the endpoint does not check them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from prorl_envs.env.base import Message
from prorl_envs.rollout.endpoint.chat import call_of, sse
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
from prorl_envs.tools.types import JsonObject, ToolSpec

#: Anthropic's name for each refusal.
_KINDS: Mapping[RefusalReason, str] = {
    RefusalReason.KEY: "authentication_error",
    RefusalReason.ROUTE: "not_found_error",
    RefusalReason.SIZE: "request_too_large",
    RefusalReason.ENDED: "permission_error",
    RefusalReason.BUSY: "rate_limit_error",
    RefusalReason.MODEL: "api_error",
}


class _Request(msgspec.Struct):
    """Fields of a request that are used."""

    messages: list[Any]
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    stream: Any = None
    max_tokens: Any = None
    model: Any = None


class Messages:
    """Implements `Shape`."""

    def read(self, data: bytes) -> EndpointRequest:
        body = parse_body(data, _Request)
        choice = body.tool_choice
        none = isinstance(choice, Mapping) and choice.get("type") == "none"
        items = objects([{"role": "system", "content": body.system}, *body.messages], "messages")
        return EndpointRequest(
            messages=conversation(message for item in items for message in _messages(item)),
            tools=() if none else _tools(body.tools),
            max_tokens=token_limit(max_tokens=body.max_tokens),
            stream=body.stream is True,
            model=str(body.model or "")[:200],
            size=len(data),
        )

    def write(self, answer: EndpointAnswer, request: EndpointRequest) -> JsonObject:
        turn = answer.turn
        content: list[JsonObject] = []
        if turn.reasoning:
            content.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
        if turn.content or not turn.tool_calls:
            content.append({"type": "text", "text": turn.content})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
            for call in turn.tool_calls
        ]
        return {
            **_head(answer.number, request),
            "content": content,
            "stop_reason": _stop(answer),
            "usage": _usage(answer),
        }

    def stream(self, request: EndpointRequest, number: int) -> "MessagesStream":
        return MessagesStream(_head(number, request))

    def error(self, refusal: RequestRefused) -> JsonObject:
        kind = _KINDS.get(refusal.reason, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": refusal.message}}


class MessagesStream:
    """Implements `AnswerStream`."""

    def __init__(self, head: JsonObject) -> None:
        self._head = head
        self._index = 0
        self._open = ""

    def begin(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}
        return _event({"type": "message_start", "message": {**self._head, "content": [], "usage": usage}})

    def reasoning(self, text: str) -> bytes:
        started = self._switch({"type": "thinking", "thinking": "", "signature": ""})
        return started + self._delta({"type": "thinking_delta", "thinking": text})

    def content(self, text: str) -> bytes:
        return self._switch({"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": text})

    def end(self, answer: EndpointAnswer) -> bytes:
        events = b""
        if not answer.turn.tool_calls and self._open != "text":
            events += self._switch({"type": "text", "text": ""})
        for call in answer.turn.tool_calls:
            events += self._close()
            events += self._switch({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            events += self._delta({"type": "input_json_delta", "partial_json": json.dumps(call.arguments)})
        events += self._close()
        delta = {"stop_reason": _stop(answer), "stop_sequence": None}
        events += _event({"type": "message_delta", "delta": delta, "usage": _usage(answer)})
        return events + _event({"type": "message_stop"})

    def fail(self, refusal: RequestRefused) -> bytes:
        return _event(Messages().error(refusal))

    def _switch(self, block: JsonObject) -> bytes:
        """Start a content block, unless a block of the same type is open."""
        if self._open == block["type"]:
            return b""
        closed = self._close()
        self._open = block["type"]
        return closed + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: JsonObject) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        self._index += 1
        return _event({"type": "content_block_stop", "index": self._index - 1})


def _event(data: JsonObject) -> bytes:
    return sse(data, data["type"])


def _tools(items: Any) -> Sequence[ToolSpec]:
    # Tools without a schema run on Anthropic's own servers.
    return [
        tool(item.get("name"), item.get("description"), item["input_schema"])
        for item in (() if items is None else objects(items, "tools"))
        if item.get("input_schema") is not None
    ]


def _messages(item: Mapping[str, Any]) -> list[Message]:
    """Convert one message to chat messages: a message for each tool result, then a message with the text."""
    role, content = item.get("role"), item.get("content")
    if role == "system":
        text = text_of(content, "system")
        return [{"role": "system", "content": text}] if text else []
    if role not in ("user", "assistant"):
        raise RequestRefused(RefusalReason.INVALID, f"messages: unknown role {str(role)[:50]!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = list(objects(content, "content"))
    if role == "assistant":
        return [_assistant(blocks)]
    results: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": text_field(block, "tool_use_id", "tool_result"),
            "content": text_of(block.get("content"), "tool_result"),
        }
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    others = [block for block in blocks if block.get("type") != "tool_result"]
    if others or not results:
        results.append(
            {"role": "user", "content": "\n\n".join(text_of([block], "content") for block in others)}
        )
    return results


def _assistant(blocks: list[Mapping[str, Any]]) -> Message:
    texts = [block for block in blocks if block.get("type") == "text"]
    message: Message = {"role": "assistant", "content": text_of(texts, "content")}
    thoughts = [str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking"]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [
        call_of(
            text_field(block, "id", "tool_use"), text_field(block, "name", "tool_use"), block.get("input")
        )
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _head(number: int, request: EndpointRequest) -> JsonObject:
    return {
        "id": f"msg_{number:08}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _stop(answer: EndpointAnswer) -> str:
    if answer.turn.tool_calls:
        return "tool_use"
    return "max_tokens" if answer.finish == "length" else "end_turn"


def _usage(answer: EndpointAnswer) -> JsonObject:
    cached = answer.cached_tokens
    return {
        "input_tokens": answer.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.completion_tokens,
    }
