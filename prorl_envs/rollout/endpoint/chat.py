"""OpenAI's Chat Completions interface (https://platform.openai.com/docs/api-reference/chat). As in vLLM,
reasoning is in the field `reasoning_content`.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from prorl_envs.env.base import Message
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
from prorl_envs.strict_json import call_arguments, json_object
from prorl_envs.tools.types import JsonObject, ToolSpec

_ROLES = {"developer": "system", "function": "tool"}
_KNOWN_ROLES = ("system", "user", "assistant", "tool")


class _Request(msgspec.Struct):
    """Fields of a request that are used."""

    messages: list[Any]
    tools: Any = None
    tool_choice: Any = None
    n: Any = None
    stream: Any = None
    stream_options: Any = None
    max_completion_tokens: Any = None
    max_tokens: Any = None
    model: Any = None


class ChatCompletions:
    """Implements `Shape`."""

    def read(self, data: bytes) -> EndpointRequest:
        body = parse_body(data, _Request)
        if body.n not in (None, 1):
            raise RequestRefused(RefusalReason.INVALID, "n: only one answer per request is supported")
        options = body.stream_options
        return EndpointRequest(
            messages=conversation(map(_message, objects(body.messages, "messages"))),
            tools=() if body.tool_choice == "none" else _tools(body.tools),
            max_tokens=token_limit(
                max_completion_tokens=body.max_completion_tokens, max_tokens=body.max_tokens
            ),
            stream=body.stream is True,
            usage=isinstance(options, Mapping) and options.get("include_usage") is True,
            model=str(body.model or "")[:200],
            size=len(data),
        )

    def write(self, answer: EndpointAnswer, request: EndpointRequest) -> JsonObject:
        turn = answer.turn
        message: JsonObject = {"role": "assistant", "content": turn.content or None, "refusal": None}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [call.to_openai() for call in turn.tool_calls]
        else:
            message["content"] = turn.content
        choice = {"index": 0, "message": message, "finish_reason": _finish(answer), "logprobs": None}
        head = _head("chat.completion", answer.number, request)
        return {**head, "choices": [choice], "usage": _usage(answer)}

    def stream(self, request: EndpointRequest, number: int) -> "ChatStream":
        return ChatStream(request, _head("chat.completion.chunk", number, request))

    def error(self, refusal: RequestRefused) -> JsonObject:
        return openai_error(refusal)


class ChatStream:
    """Implements `AnswerStream`."""

    def __init__(self, request: EndpointRequest, head: JsonObject) -> None:
        self._request = request
        self._head = head

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def reasoning(self, text: str) -> bytes:
        return self._chunk({"reasoning_content": text})

    def content(self, text: str) -> bytes:
        return self._chunk({"content": text})

    def end(self, answer: EndpointAnswer) -> bytes:
        events = b""
        if answer.turn.tool_calls:
            calls = [{"index": i, **call.to_openai()} for i, call in enumerate(answer.turn.tool_calls)]
            events = self._chunk({"tool_calls": calls})
        events += self._chunk({}, _finish(answer))
        if self._request.usage:
            events += sse({**self._head, "choices": [], "usage": _usage(answer)})
        return events + b"data: [DONE]\n\n"

    def fail(self, refusal: RequestRefused) -> bytes:
        return sse(openai_error(refusal))

    def _chunk(self, delta: JsonObject, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return sse({**self._head, "choices": [choice]})


def sse(data: JsonObject, event: str = "") -> bytes:
    """Return one server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode("utf-8", "replace")


def openai_error(refusal: RequestRefused) -> JsonObject:
    """Return a refusal as an error of OpenAI's interfaces."""
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {"error": {"message": refusal.message, "type": kind, "param": None, "code": refusal.reason.value}}


def _tools(items: Any) -> Sequence[ToolSpec]:
    tools = []
    for item in () if items is None else objects(items, "tools"):
        function = item.get("function")
        if item.get("type") != "function" or not isinstance(function, Mapping):
            raise RequestRefused(RefusalReason.INVALID, "tools: only functions are supported")
        tools.append(tool(function.get("name"), function.get("description"), function.get("parameters")))
    return tools


def _message(item: Mapping[str, Any]) -> Message:
    role = item.get("role")
    role = _ROLES.get(role, role) if isinstance(role, str) else role
    if role not in _KNOWN_ROLES:
        raise RequestRefused(RefusalReason.INVALID, f"messages: unknown role {str(role)[:50]!r}")
    message: Message = {"role": role, "content": text_of(item.get("content"), "messages")}
    if role == "tool":
        message["tool_call_id"] = str(item.get("tool_call_id") or item.get("name") or "")
    if role != "assistant":
        return message
    calls = item.get("tool_calls")
    if parsed := [_call(call) for call in objects([] if calls is None else calls, "tool_calls")]:
        message["tool_calls"] = parsed
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    return message


def _call(item: Mapping[str, Any]) -> JsonObject:
    function = item.get("function")
    if not isinstance(function, Mapping):
        raise RequestRefused(RefusalReason.INVALID, "tool_calls: a call has no function")
    return call_of(
        str(item.get("id") or ""), text_field(function, "name", "tool_calls"), function.get("arguments")
    )


def call_of(id_: str, name: str, arguments: Any) -> JsonObject:
    """Return a tool call of a message in OpenAI's format. Chat templates accept only JSON objects as
    arguments, so any other value becomes a single argument. Some clients encode objects twice."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    if json_object(text) is None:
        found = call_arguments(arguments)
        text = json.dumps({"arguments": arguments} if found is None else found)
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": text}}


def _head(kind: str, number: int, request: EndpointRequest) -> JsonObject:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": request.model}


def _finish(answer: EndpointAnswer) -> str:
    if answer.turn.tool_calls:
        return "tool_calls"
    return "length" if answer.finish == "length" else "stop"


def _usage(answer: EndpointAnswer) -> JsonObject:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
