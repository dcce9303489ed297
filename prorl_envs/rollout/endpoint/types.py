"""What the shapes of a model endpoint have in common: requests, answers, refusals."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from prorl_envs.env.base import Message
from prorl_envs.policy.types import AssistantTurn, FinishReason
from prorl_envs.tools.types import JsonObject, ToolSpec

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
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    max_tokens: int | None = None
    stream: bool = False
    usage: bool = True
    model: str = ""
    size: int = 0


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

    def read(self, body: Mapping[str, Any]) -> Asked:
        """What a request asks for.

        Raises:
            Refused: it is malformed, or asks for what there is not.
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
        if not isinstance(item, Mapping):
            raise Refused(Why.INVALID, f"{where} holds what is no object")
        yield item


def text_at(value: Mapping[str, Any], key: str, where: str) -> str:
    """The text under a key.

    Raises:
        Refused: there is none.
    """
    found = value.get(key)
    if not isinstance(found, str):
        raise Refused(Why.INVALID, f"{where}: {key} is missing, or no text")
    return found


def most_tokens(body: Mapping[str, Any], *keys: str) -> int | None:
    """The first of some numbers of tokens that is given.

    Raises:
        Refused: it is none.
    """
    for key in keys:
        value = body.get(key)
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


def tidied(messages: Sequence[Message]) -> list[Message]:
    """Messages as chat templates take them: what the system says at the beginning is one message, and what it
    says later is said by a user; the names of tools stand beside their results.

    Raises:
        Refused: there is none for the model to answer.
    """
    system: list[str] = []
    rest: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        role = message["role"]
        if role == "system" and not rest:
            system.append(message["content"])
            continue
        if role == "system":
            message = {**message, "role": "user"}
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if role == "tool" and (name := names.get(message["tool_call_id"])):
            message = {**message, "name": name}
        rest.append(message)
    if not rest or rest[-1]["role"] == "assistant":
        raise Refused(
            Why.INVALID, "the last message must be a user's or a tool's: answers are not begun here"
        )
    return [{"role": "system", "content": "\n\n".join(system)}, *rest] if system else rest
