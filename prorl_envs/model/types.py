"""Types between an agent loop and a model: token ids, never text.

A prompt is a list of ids. An answer consists of the sampled ids with their log-probabilities. A new
observation is rendered separately, and its ids are appended. Sampled text is never tokenised again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.tools.types import ToolCall, ToolSpec

type FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Partial:
    """Part of an answer that is still being sampled.

    Args:
        ids, logprobs: all ids sampled so far and their log-probabilities; both lists grow.
        weight_version, server: as in `Sampled`; the version is "" until it is known.
    """

    ids: list[int]
    logprobs: list[float]
    weight_version: str
    server: str


type OnPartial = Callable[[Partial], None]
"""Callback for the partial answer during sampling. Fewer ids than before mean that sampling was restarted."""

type Reasoning = Literal["keep", "user_turn", "template"]
"""Handling of earlier reasoning when a conversation continues. `keep`: it stays, so the context only grows.
`user_turn`: the template may drop it at a user message. `template`: the template may drop it at each turn. If
reasoning is dropped, the ledger forks."""


class Sampling(BaseModel):
    """Sampling parameters of one turn.

    Args:
        temperature: softmax temperature, >= 0.
        top_p: nucleus mass, in (0, 1].
        max_tokens: maximum tokens sampled in one turn.
        seed: the server's sampling seed, or None; bounded so that a sample's index can be added in 64 bits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    max_tokens: int = Field(default=2048, ge=1, le=1_000_000)
    seed: int | None = Field(default=None, ge=0, le=2**62)


class VersionSpan(BaseModel):
    """Span of one answer that was sampled by one version of the weights.

    Args:
        version: name of the version on the server.
        start, end: indices into the answer's ids; `end` is one past the last.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    start: int = Field(ge=0)
    end: int = Field(ge=0)


def spans_at(offset: int, count: int, version: str, spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Return the spans of an answer of `count` ids at `offset`. Without `spans`, one version sampled all."""
    return [
        VersionSpan(version=span.version, start=offset + span.start, end=offset + span.end)
        for span in spans or (VersionSpan(version=version, start=0, end=count),)
        if span.end > span.start
    ]


def joined_spans(spans: Iterable[VersionSpan]) -> list[VersionSpan]:
    """Join adjacent spans of one version."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].version == span.version and joined[-1].end == span.start:
            joined[-1] = joined[-1].model_copy(update={"end": span.end})
        else:
            joined.append(span)
    return joined


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer of a model server.

    Args:
        ids: the sampled token ids, including the stop token if one was sampled.
        logprobs: log-probability of each id under the sampling policy; same length as `ids`.
        finish_reason: why sampling stopped.
        weight_version: version of the weights that sampled the answer, the oldest of several; "" if unknown.
        server: base URL of the server that answered, the last of several.
        version_spans: the span of each version, if several versions sampled the answer; they cover all ids.
        cached_tokens: prompt tokens the server found in its prefix cache; None if it does not report them.
        exact: False if the server returned text. Then `ids` are a tokenisation of the text, `logprobs` are
            zeros, and the answer cannot be used for training.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: str
    server: str
    version_spans: tuple[VersionSpan, ...] = ()
    cached_tokens: int | None = None
    exact: bool = True

    @property
    def newest_version(self) -> str:
        """Version of the weights that sampled the last id; "" if unknown."""
        return self.version_spans[-1].version if self.version_spans else self.weight_version


@dataclass(frozen=True, slots=True)
class Conversation:
    """Content of a prompt as messages, for servers that take no ids.

    Args:
        messages: all messages, in OpenAI's format.
        tools: the offered tools.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[ToolSpec]


@dataclass(frozen=True, slots=True)
class ServerNews:
    """State that a server reports on request.

    Args:
        model: name of the model it serves, or "".
        weight_version: version of its weights, or "".
    """

    model: str = ""
    weight_version: str = ""


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """A parsed answer.

    Args:
        content: the text outside reasoning and tool calls.
        tool_calls: the well-formed calls, in order.
        malformed: one message for the model per tool call that could not be read.
        reasoning: the model's reasoning before the answer.
    """

    content: str
    tool_calls: tuple[ToolCall, ...]
    malformed: tuple[str, ...]
    reasoning: str = ""


class ModelClient(Protocol):
    """Client that samples turns from model servers."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        """Sample one turn.

        Args:
            prompt_ids: the whole context, as ids.
            sampling: sampling parameters.
            session: the rollout's id; turns of one session go to one server while that server is up.

        Raises:
            ModelError: no server answered, or an answer breaks the token protocol.
        """
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class Streaming(Protocol):
    """A server that reports an answer during sampling."""

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, on_partial: OnPartial
    ) -> Sampled:
        """Sample as `ModelClient.generate` does, and call `on_partial` when ids arrive."""
        ...


@runtime_checkable
class RoutedModelClient(Protocol):
    """Client of several servers that samples on one of them and holds turns while weights change."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        conversation: Conversation | None = None,
        on_partial: OnPartial | None = None,
    ) -> Sampled:
        """Sample as `ModelClient.generate` does.

        Args:
            conversation: the prompt as messages, for servers that take no ids.
            on_partial: receives the partial answer during sampling, if the server supports it.
        """
        ...

    def paused_s(self) -> float:
        """Return the total seconds for which turns were held so far."""
        ...

    def forget(self, session: str) -> None:
        """Release the pin of a closed session."""
        ...

    async def aclose(self) -> None: ...


type InFlight = Literal["finish", "abort", "keep"]
"""Handling of turns in flight while weights change. `finish`: they run to completion. `abort`: they stop at
once with the ids sampled so far. `keep`: they freeze, and continue with the new weights."""


@runtime_checkable
class ControllableServer(Protocol):
    """A server that reports its state and can be paused for weight updates."""

    @property
    def protocol(self) -> str:
        """Protocol of the server; "" before it is known."""
        ...

    @property
    def complaints(self) -> int:
        """Number of times the server reported overload."""
        ...

    async def look(self) -> ServerNews:
        """Send one health check, with a short timeout.

        Raises:
            ModelError: the server is not healthy.
        """
        ...

    async def pause(self, mode: InFlight) -> bool:
        """Stop sampling; return False if the server does not support it. Idempotent.

        Raises:
            ModelError: the server supports pauses, but this pause failed.
        """
        ...

    async def resume(self, weight_version: str) -> bool:
        """Resume sampling with weights of this version ("" if unknown); return False if not supported.

        Raises:
            ModelError: the request failed.
        """
        ...


class ServerHealth(StrEnum):
    """Health of a model server, which decides whether it gets turns."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    FAILING = "failing"
    DRAINING = "draining"
