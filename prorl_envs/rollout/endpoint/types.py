"""What the shapes of a model endpoint have in common: requests, answers, refusals."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from prorl_envs.env.base import Message
from prorl_envs.policy.types import AssistantTurn, FinishReason
from prorl_envs.tools.types import JsonObject, ToolSpec

NOT_JSON = "the body is no JSON object"
#: What a request does not say.
NULL = msgspec.Raw(b"null")
#: Takes the place of content that has no tokens: images, documents, sound.
LEFT_OUT = "[left out: the model reads text alone]"


class Why(StrEnum):
    """Why a request is refused."""

    INVALID = "invalid_request"
    KEY = "unknown_key"
    ROUTE = "unknown_route"
    SIZE = "too_large"
    CONTEXT = "context_length_exceeded"
    ENDED = "rollout_ended"
    BUSY = "too_many_requests"
    MODEL = "model_failed"


#: The HTTP status of each; clients try 429 and 5xx again, and the others not.
STATUS: Mapping[Why, int] = {
    Why.INVALID: 400,
    Why.KEY: 401,
    Why.ROUTE: 404,
    Why.SIZE: 413,
    Why.CONTEXT: 400,
    Why.ENDED: 403,
    Why.BUSY: 429,
    Why.MODEL: 503,
}


class Refused(Exception):
    """A request that is not answered.

    Args:
        why: the reason.
        message: what the caller is told.
    """

    def __init__(self, why: Why, message: str) -> None:
        super().__init__(message)
        self.why = why
        self.message = message

    @property
    def status(self) -> int:
        return STATUS[self.why]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for an answer, whatever its shape.

    Args:
        messages: in OpenAI's Chat Completions shape, content as text; a system message comes first or not at
            all, and the last one is not the model's.
        tools: on offer.
        max_tokens: most tokens of the answer, or None.
        stream: whether it is told as it is sampled.
        usage: whether a stream ends with the numbers of tokens, where that is a choice.
        model: as the caller names it; answered, and not heeded.
        size: bytes of the request.
        keys, tools_key: of the messages and the tools, as `likeness` has them; empty where not known.
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
    """A request whose conversation is not read yet.

    Args:
        items: of the conversation, JSON each.
        tools: on offer, JSON.
        asked: the rest.
    """

    items: Sequence[bytes]
    tools: bytes
    asked: Asked


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, as the shapes tell it.

    Args:
        number: of the call within its rollout.
        turn: what was said. Ids of tool calls are unique within the rollout.
        finish: why sampling ended.
        prompt_tokens, completion_tokens, cached_tokens: how many.
    """

    number: int
    turn: AssistantTurn
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Telling(Protocol):
    """One answer told as a stream of server-sent events."""

    def begin(self) -> bytes:
        """What comes before anything is sampled."""
        ...

    def reasoning(self, text: str) -> bytes:
        """More of what the model thinks first."""
        ...

    def content(self, text: str) -> bytes:
        """More of what it says."""
        ...

    def end(self, answered: Answered) -> bytes:
        """The tool calls, and the end. Text that was not told before comes first, by the two above."""
        ...

    def fail(self, refused: Refused) -> bytes:
        """There is no answer after all."""
        ...


class Shape(Protocol):
    """One vendor's interface."""

    @property
    def joins(self) -> bool:
        """Items of an answer that follow each other are one message."""
        ...

    def open(self, data: bytes) -> Body:
        """A request, its conversation not read yet.

        Raises:
            Refused: it is malformed, or asks for what there is not.
        """
        ...

    def item(self, item: Any) -> Sequence[Message]:
        """The messages of an item of the conversation.

        Raises:
            Refused: it is malformed.
        """
        ...

    def tools(self, given: Any) -> Sequence[ToolSpec]:
        """The tools on offer.

        Raises:
            Refused: one of them cannot be offered.
        """
        ...

    def write(self, answered: Answered, asked: Asked) -> JsonObject:
        """An answer in one piece."""
        ...

    def telling(self, asked: Asked, number: int) -> Telling:
        """An answer as a stream; `number` makes its name."""
        ...

    def error(self, refused: Refused) -> JsonObject:
        """The body of a refusal."""
        ...


def opened[BodyT](data: bytes, kind: type[BodyT]) -> BodyT:
    """A body, as far as `kind` says.

    Raises:
        Refused: it is no JSON, or of another shape.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise Refused(Why.INVALID, str(error)) from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        pass
    try:  # half a surrogate pair, which JSON can spell and no text can hold
        mended = json.dumps(json.loads(data), ensure_ascii=False).encode("utf-8", "replace")
        return msgspec.json.decode(mended, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError):  # of UTF-8 too
        raise Refused(Why.INVALID, NOT_JSON) from None


def as_item(role: str, content: msgspec.Raw | str) -> bytes:
    """What stands beside a conversation, as an item of it.

    Args:
        content: JSON, or a text.
    """
    return msgspec.json.encode({"role": role, "content": content})


def text_of(content: Any, where: str) -> str:
    """Text of a message's content: a string, or parts of which those with text count.

    Raises:
        Refused: it is neither.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(Why.INVALID, f"{where}: content is neither text nor a list of parts")
    return "".join(_part(part, where) for part in content)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise Refused(Why.INVALID, f"{where}: a part of the content is no object")
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            return str(part[key])
    return LEFT_OUT


def objects(value: Any, where: str) -> Iterator[Mapping[str, Any]]:
    """The objects of a list.

    Raises:
        Refused: it is none.
    """
    if not isinstance(value, list):
        raise Refused(Why.INVALID, f"{where} is no list")
    for item in value:
        yield an_object(item, where)


def an_object(value: Any, where: str) -> Mapping[str, Any]:
    """The value itself.

    Raises:
        Refused: it is no object.
    """
    if not isinstance(value, Mapping):
        raise Refused(Why.INVALID, f"{where} holds what is no object")
    return value


def text_at(value: Mapping[str, Any], key: str, where: str) -> str:
    """The text under a key.

    Raises:
        Refused: there is none.
    """
    found = value.get(key)
    if not isinstance(found, str):
        raise Refused(Why.INVALID, f"{where}: {key} is missing, or no text")
    return found


def most_tokens(**given: Any) -> int | None:
    """The first of some numbers of tokens, by name, that is given.

    Raises:
        Refused: it is none.
    """
    for key, value in given.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refused(Why.INVALID, f"{key} is no number of tokens")
        return value
    return None


def tool(name: Any, description: Any, parameters: Any) -> ToolSpec:
    """A tool on offer.

    Raises:
        Refused: it has no name, or its parameters are no schema.
    """
    if not isinstance(name, str) or not name:
        raise Refused(Why.INVALID, "tools: one has no name")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise Refused(Why.INVALID, f"tools: the parameters of {name[:100]} are no schema")
    return ToolSpec(name, description if isinstance(description, str) else "", parameters)
