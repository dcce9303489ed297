"""Common types of the endpoint's interfaces: requests, answers, refusals."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from prorl_envs.env.base import Message
from prorl_envs.model.types import AssistantTurn, FinishReason
from prorl_envs.tools.types import JsonObject, ToolSpec

NOT_JSON = "the body is not a JSON object"
#: Replaces content other than text: images, documents, sound.
OMITTED = "[omitted: the model only reads text]"


class RefusalReason(StrEnum):
    """Reason why a request is refused."""

    INVALID = "invalid_request"
    KEY = "unknown_key"
    ROUTE = "unknown_route"
    SIZE = "too_large"
    CONTEXT = "context_length_exceeded"
    ENDED = "rollout_ended"
    BUSY = "too_many_requests"
    MODEL = "model_failed"


#: HTTP status of each reason; clients retry 429 and 5xx only.
STATUS: Mapping[RefusalReason, int] = {
    RefusalReason.INVALID: 400,
    RefusalReason.KEY: 401,
    RefusalReason.ROUTE: 404,
    RefusalReason.SIZE: 413,
    RefusalReason.CONTEXT: 400,
    RefusalReason.ENDED: 403,
    RefusalReason.BUSY: 429,
    RefusalReason.MODEL: 503,
}


class RequestRefused(Exception):
    """Error: a request is refused.

    Args:
        why: the reason.
        message: text for the client.
    """

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message

    @property
    def status(self) -> int:
        return STATUS[self.reason]


@dataclass(frozen=True, slots=True)
class EndpointRequest:
    """Request for an answer, independent of the interface.

    Args:
        messages: conversation in OpenAI's Chat Completions format, with content as text. Only the first
            message can be a system message, and the last message is not the model's.
        tools: available tools.
        max_tokens: maximum number of tokens in the answer, or None.
        stream: stream the answer while it is sampled.
        usage: a stream includes the token counts, if this is optional in the interface.
        model: name of the model in the request; returned, but otherwise ignored.
        size: size of the request in bytes.
    """

    messages: Sequence[Message] = ()
    tools: Sequence[ToolSpec] = ()
    max_tokens: int | None = None
    stream: bool = False
    usage: bool = True
    model: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class EndpointAnswer:
    """Answer, independent of the interface.

    Args:
        number: number of the call within its rollout.
        turn: the parsed answer. Ids of tool calls are unique within the rollout.
        finish: reason why sampling stopped.
        prompt_tokens, completion_tokens, cached_tokens: token counts.
    """

    number: int
    turn: AssistantTurn
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class AnswerStream(Protocol):
    """Writer of one answer as a stream of server-sent events."""

    def begin(self) -> bytes:
        """Return the events before the first token."""
        ...

    def reasoning(self, text: str) -> bytes:
        """Return events for more reasoning."""
        ...

    def content(self, text: str) -> bytes:
        """Return events for more content."""
        ...

    def end(self, answer: EndpointAnswer) -> bytes:
        """Return events for the tool calls, and the final events, after `reasoning` and `content`."""
        ...

    def fail(self, refusal: RequestRefused) -> bytes:
        """Return the events for a failure during the stream."""
        ...


class Shape(Protocol):
    """Wire format of one vendor's interface."""

    def read(self, data: bytes) -> EndpointRequest:
        """Parse a request.

        Raises:
            RequestRefused: the request is malformed, or needs an unsupported feature.
        """
        ...

    def write(self, answer: EndpointAnswer, request: EndpointRequest) -> JsonObject:
        """Return an answer as one JSON response."""
        ...

    def stream(self, request: EndpointRequest, number: int) -> AnswerStream:
        """Return the writer of a streamed answer, whose id contains `number`."""
        ...

    def error(self, refusal: RequestRefused) -> JsonObject:
        """Return the body of a refusal."""
        ...


def parse_body[BodyT](data: bytes, kind: type[BodyT]) -> BodyT:
    """Parse a body into the fields of `kind`.

    Raises:
        RequestRefused: the body is not JSON, or does not match `kind`.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise RequestRefused(RefusalReason.INVALID, str(error)) from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        pass
    try:  # replace lone surrogates: Python's parser accepts them, msgspec does not
        replaced = json.dumps(json.loads(data), ensure_ascii=False).encode("utf-8", "replace")
        return msgspec.json.decode(replaced, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError):  # includes UnicodeDecodeError
        raise RequestRefused(RefusalReason.INVALID, NOT_JSON) from None


def conversation(messages: Iterable[Message], *, joins: bool = False) -> list[Message]:
    """Return messages in a form that chat templates accept: system messages at the start are joined, later
    ones become user messages, and tool results contain the name of their tool.

    Args:
        messages: messages of a request. They may be changed.
        joins: True if consecutive messages of the model are joined to one.

    Raises:
        RequestRefused: the last message is the model's or a system message.
    """
    result: list[Message] = []
    names: dict[str, str] = {}  # tool names by call id
    for message in messages:
        role = message["role"]
        last_role = result[-1]["role"] if result else ""
        if role == "system" and (len(result) > 1 or last_role not in ("", "system")):
            role = message["role"] = "user"
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if role == "tool" and (name := names.get(message["tool_call_id"])):
            message["name"] = name
        if role == last_role and (role == "system" or (role == "assistant" and joins)):
            _join(result[-1], message)
        else:
            result.append(message)
    if not result or result[-1]["role"] in ("system", "assistant"):
        raise RequestRefused(
            RefusalReason.INVALID,
            "the last message must be a user's or a tool's; prefilled answers are not supported",
        )
    return result


def _join(last: Message, message: Message) -> None:
    between = "\n\n" if message["role"] == "system" else ""
    last["content"] += between + message["content"]
    if calls := message.get("tool_calls"):
        last.setdefault("tool_calls", []).extend(calls)


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, or the text parts of a list.

    Raises:
        RequestRefused: the content is neither a string nor a list of parts.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused(RefusalReason.INVALID, f"{where}: content is neither text nor a list of parts")
    return "".join(_part(part, where) for part in content)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestRefused(RefusalReason.INVALID, f"{where}: a part of the content is not an object")
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            return str(part[key])
    return OMITTED


def objects(value: Any, where: str) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a list.

    Raises:
        RequestRefused: the value is not a list of objects.
    """
    if not isinstance(value, list):
        raise RequestRefused(RefusalReason.INVALID, f"{where} is not a list")
    for item in value:
        yield check_object(item, where)


def check_object(value: Any, where: str) -> Mapping[str, Any]:
    """Return the value if it is a JSON object.

    Raises:
        RequestRefused: the value is not an object.
    """
    if not isinstance(value, Mapping):
        raise RequestRefused(RefusalReason.INVALID, f"{where}: an item is not an object")
    return value


def text_field(value: Mapping[str, Any], key: str, where: str) -> str:
    """Return the text under a key.

    Raises:
        RequestRefused: the key is missing, or its value is not text.
    """
    text = value.get(key)
    if not isinstance(text, str):
        raise RequestRefused(RefusalReason.INVALID, f"{where}: {key} is missing or not text")
    return text


def token_limit(**fields: Any) -> int | None:
    """Return the first of these fields that is set, or None. Each is a limit of tokens.

    Raises:
        RequestRefused: the field is not a positive integer.
    """
    for key, value in fields.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RequestRefused(RefusalReason.INVALID, f"{key} is not a number of tokens")
        return value
    return None


def tool(name: Any, description: Any, parameters: Any) -> ToolSpec:
    """Return the specification of a tool.

    Raises:
        RequestRefused: the tool has no name, or its parameters are not a schema.
    """
    if not isinstance(name, str) or not name:
        raise RequestRefused(RefusalReason.INVALID, "tools: a tool has no name")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RequestRefused(RefusalReason.INVALID, f"tools: the parameters of {name[:100]} are not a schema")
    return ToolSpec(name, description if isinstance(description, str) else "", parameters)
