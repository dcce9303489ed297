"""Common types of a model endpoint's interfaces: requests, answers, refusals."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from prorl_envs.env.base import Message
from prorl_envs.model.types import AssistantTurn, FinishReason
from prorl_envs.tools.types import JsonObject, ToolSpec

NOT_JSON = "the body is no JSON object"
#: Value of a missing field.
NULL = msgspec.Raw(b"null")
#: Replaces content that has no tokens: images, documents, sound.
LEFT_OUT = "[left out: the model reads text alone]"


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
        message: text for the caller.
    """

    def __init__(self, why: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.why = why
        self.message = message

    @property
    def status(self) -> int:
        return STATUS[self.why]


@dataclass(frozen=True, slots=True)
class EndpointRequest:
    """Request for an answer, independent of the interface.

    Args:
        messages: in OpenAI's Chat Completions shape, content as text; a system message can only be the
            first, and the last message is not the model's.
        tools: available tools.
        max_tokens: most tokens of the answer, or None.
        stream: stream the answer while it is sampled.
        usage: a stream includes the token counts, if the interface makes this optional.
        model: name from the caller; returned, but otherwise ignored.
        size: bytes of the request.
        keys, tools_key: keys of messages and tools, see `conversation_key`; empty if not known.
    """

    messages: Sequence[Message] = ()
    tools: Sequence[ToolSpec] = ()
    max_tokens: int | None = None
    stream: bool = False
    usage: bool = True
    model: str = ""
    size: int = 0
    keys: Sequence[bytes] = ()
    tools_key: bytes = b""


@dataclass(frozen=True, slots=True)
class Body:
    """Request whose conversation is not parsed yet.

    Args:
        items: items of the conversation, JSON each.
        tools: available tools, JSON.
        asked: the rest.
    """

    items: Sequence[bytes]
    tools: bytes
    asked: EndpointRequest


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

    def end(self, answered: EndpointAnswer) -> bytes:
        """Return the tool calls and the final events. Unsent text must be sent before, with the two
        methods above."""
        ...

    def fail(self, refused: RequestRefused) -> bytes:
        """Return the events for a failure after the start of the stream."""
        ...


class Shape(Protocol):
    """Interface of one vendor."""

    @property
    def joins(self) -> bool:
        """True if consecutive items of an answer form one message."""
        ...

    def open(self, data: bytes) -> Body:
        """Parse a request except for its conversation.

        Raises:
            RequestRefused: it is malformed, or needs an unsupported feature.
        """
        ...

    def item(self, item: Any) -> Sequence[Message]:
        """Return the messages of an item of the conversation.

        Raises:
            RequestRefused: it is malformed.
        """
        ...

    def tools(self, given: Any) -> Sequence[ToolSpec]:
        """Return the available tools.

        Raises:
            RequestRefused: a tool is not supported.
        """
        ...

    def write(self, answered: EndpointAnswer, asked: EndpointRequest) -> JsonObject:
        """Return an answer as one JSON response."""
        ...

    def telling(self, asked: EndpointRequest, number: int) -> AnswerStream:
        """Return a writer for a streamed answer; its id contains `number`."""
        ...

    def error(self, refused: RequestRefused) -> JsonObject:
        """Return the body of a refusal."""
        ...


def opened[BodyT](data: bytes, kind: type[BodyT]) -> BodyT:
    """Parse a body into the fields of `kind`.

    Raises:
        RequestRefused: it is not JSON, or does not match `kind`.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise RequestRefused(RefusalReason.INVALID, str(error)) from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        pass
    try:  # half a surrogate pair, which is valid in JSON but not in text
        mended = json.dumps(json.loads(data), ensure_ascii=False).encode("utf-8", "replace")
        return msgspec.json.decode(mended, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError):  # includes UnicodeDecodeError
        raise RequestRefused(RefusalReason.INVALID, NOT_JSON) from None


def as_item(role: str, content: msgspec.Raw | str) -> bytes:
    """Return content from outside the conversation as an item of it.

    Args:
        content: JSON, or a text.
    """
    return msgspec.json.encode({"role": role, "content": content})


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, or the text parts of a list.

    Raises:
        RequestRefused: it is neither.
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
        raise RequestRefused(RefusalReason.INVALID, f"{where}: a part of the content is no object")
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            return str(part[key])
    return LEFT_OUT


def objects(value: Any, where: str) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a list.

    Raises:
        RequestRefused: it is not a list of objects.
    """
    if not isinstance(value, list):
        raise RequestRefused(RefusalReason.INVALID, f"{where} is no list")
    for item in value:
        yield an_object(item, where)


def an_object(value: Any, where: str) -> Mapping[str, Any]:
    """Return the value unchanged.

    Raises:
        RequestRefused: it is not an object.
    """
    if not isinstance(value, Mapping):
        raise RequestRefused(RefusalReason.INVALID, f"{where} holds what is no object")
    return value


def text_at(value: Mapping[str, Any], key: str, where: str) -> str:
    """Return the text under a key.

    Raises:
        RequestRefused: there is none.
    """
    found = value.get(key)
    if not isinstance(found, str):
        raise RequestRefused(RefusalReason.INVALID, f"{where}: {key} is missing, or no text")
    return found


def most_tokens(**given: Any) -> int | None:
    """Return the first of several token limits, by name, that is set.

    Raises:
        RequestRefused: it is not a number of tokens.
    """
    for key, value in given.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RequestRefused(RefusalReason.INVALID, f"{key} is no number of tokens")
        return value
    return None


def tool(name: Any, description: Any, parameters: Any) -> ToolSpec:
    """Return an available tool.

    Raises:
        RequestRefused: it has no name, or its parameters are not a schema.
    """
    if not isinstance(name, str) or not name:
        raise RequestRefused(RefusalReason.INVALID, "tools: one has no name")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RequestRefused(RefusalReason.INVALID, f"tools: the parameters of {name[:100]} are no schema")
    return ToolSpec(name, description if isinstance(description, str) else "", parameters)
