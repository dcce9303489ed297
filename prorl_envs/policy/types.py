"""What passes between an agent loop and a model: token ids, never text.

The sampled ids are the truth. A prompt is a list of ids; an answer is the sampled ids with their
log-probabilities; a new observation is rendered as its own ids and appended. Nothing sampled is ever
tokenised again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.tools.types import ToolCall, ToolSpec

type FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Partial:
    """An answer while it is sampled.

    Args:
        ids, logprobs: all so far, of the same length; they grow.
        weight_version, server: as of `Sampled`, as far as they are known.
    """

    ids: list[int]
    logprobs: list[float]
    weight_version: str
    server: str


type Heard = Callable[[Partial], None]
"""Told of an answer while it is sampled. Fewer ids than before: its sampling began anew."""

type Reasoning = Literal["keep", "user_turn", "template"]
"""What becomes of earlier reasoning when a conversation goes on: it stays (the context only grows); it is
dropped where a user speaks, if the template does so; or the template decides at each turn. Where something is
dropped, the ledger forks."""


class Sampling(BaseModel):
    """How to sample one turn.

    Args:
        temperature: softmax temperature, >= 0.
        top_p: nucleus mass, in (0, 1].
        max_tokens: most tokens sampled in one turn.
        seed: the server's sampling seed, or None; bounded so that a sample's index can be added in 64 bits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    max_tokens: int = Field(default=2048, ge=1, le=1_000_000)
    seed: int | None = Field(default=None, ge=0, le=2**62)


class VersionSpan(BaseModel):
    """A stretch of one answer that was sampled by one version of the weights.

    Args:
        version: as the server names it.
        start, end: indices into the answer's ids; `end` is one past the last.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    start: int = Field(ge=0)
    end: int = Field(ge=0)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer of a model server.

    Args:
        ids: the sampled token ids, stop token included where one was sampled.
        logprobs: log-probability of each id under the sampling policy; same length as `ids`.
        finish_reason: why sampling ended.
        weight_version: the version of the weights that sampled it, the oldest one where there were several;
            "" where none is known.
        server: base URL of the server that answered, the last one where there were several.
        version_spans: where several versions sampled it, which one sampled what; they cover all ids.
        cached_tokens: prompt tokens the server found in its prefix cache; None where it does not say.
        exact: False where the server gave text: `ids` are then a tokenisation of it and `logprobs` zeros,
            and nothing of it can be trained on.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: str
    server: str
    version_spans: tuple[VersionSpan, ...] = ()
    cached_tokens: int | None = None
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt says, as messages: for servers that take no ids.

    Args:
        messages: in OpenAI's shape, from the first on.
        tools: the tools on offer.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[ToolSpec]


@dataclass(frozen=True, slots=True)
class ServerNews:
    """What a server says of itself when it is asked.

    Args:
        model: name of the model it serves, or "".
        weight_version: version of its weights, or "".
    """

    model: str = ""
    weight_version: str = ""


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """A sampled answer, read.

    Args:
        content: the text outside reasoning and tool calls.
        tool_calls: the well-formed calls, in order.
        malformed: one message per tool call that could not be read, written for the model.
        reasoning: what the model thought first.
    """

    content: str
    tool_calls: tuple[ToolCall, ...]
    malformed: tuple[str, ...]
    reasoning: str = ""


class ModelClient(Protocol):
    """Samples turns from model servers."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        """Sample one turn.

        Args:
            prompt_ids: the whole context, as ids.
            sampling: how to sample.
            session: the rollout's id; turns of one session go to one server while it lives.

        Raises:
            ModelError: no server answered, or an answer breaks the token protocol.
        """
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class Streaming(Protocol):
    """A server that tells of an answer while it is sampled."""

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, heard: Heard
    ) -> Sampled:
        """As `ModelClient.generate`, telling `heard` as ids come."""
        ...


@runtime_checkable
class PooledModel(Protocol):
    """Samples on one of several servers, and holds turns while their weights change."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        conversation: Conversation | None = None,
        heard: Heard | None = None,
    ) -> Sampled:
        """As `ModelClient.generate`.

        Args:
            conversation: the prompt as messages, for servers that take no ids.
            heard: told of the answer while it is sampled, by servers that can.
        """
        ...

    def paused_s(self) -> float:
        """Seconds for which turns were held, all in all, up to now."""
        ...

    def forget(self, session: str) -> None:
        """A session has ended; its pin is given up."""
        ...

    async def aclose(self) -> None: ...


type InFlight = Literal["finish", "abort", "keep"]
"""What becomes of turns in flight while weights change: they end in their own time, they end at once with
what was sampled so far, or they stand still and go on with the new weights."""


@runtime_checkable
class ChatClient(Protocol):
    """Samples turns from a server that takes messages and gives text: the lesser mode."""

    async def chat(self, conversation: Conversation, sampling: Sampling, *, session: str) -> Sampled:
        """Sample one turn; `Sampled.exact` is False.

        Raises:
            ModelError: as `ModelClient.generate`.
        """
        ...


@runtime_checkable
class Steerable(Protocol):
    """A server that can be asked how it is, and told that its weights change."""

    @property
    def protocol(self) -> str:
        """What it speaks; "" before that is known."""
        ...

    @property
    def complaints(self) -> int:
        """How often it said that it has too much to do."""
        ...

    async def look(self) -> ServerNews:
        """Ask how it is, once and soon.

        Raises:
            ModelError: it is not well.
        """
        ...

    async def pause(self, mode: InFlight) -> bool:
        """Stop sampling; False where the server has no way to. Pausing twice is the same.

        Raises:
            ModelError: it has, and failed.
        """
        ...

    async def resume(self, weight_version: str) -> bool:
        """Go on, with weights of this version ("" where it is not known); False where it cannot be told.

        Raises:
            ModelError: it failed.
        """
        ...


class Renderer(Protocol):
    """Turns messages into ids and ids into messages, for one tokenizer and chat template."""

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Sequence[ToolSpec]) -> list[int]:
        """Ids of a conversation's beginning, ready for the first answer."""
        ...

    def bridge(self, sampled: Sampled, observations: Sequence[dict[str, Any]]) -> list[int]:
        """Ids to append after `sampled` so that `observations` (tool or user messages) are read and the
        next answer can begin. Never touches what was sampled; closes a truncated turn."""
        ...

    def assistant(self, message: Mapping[str, Any]) -> list[int]:
        """Ids of an answer that the model did not sample, as its template writes them."""
        ...

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSpec] = (), *, prompt_ids: Sequence[int] | None = None
    ) -> AssistantTurn:
        """Read a sampled answer. Total: every id sequence gives a turn.

        Args:
            ids: the answer.
            tools: those on offer, whose schemas say what unquoted values are.
            prompt_ids: the context before it; None for a conversation's first.
        """
        ...

    def without_stop(self, ids: Sequence[int]) -> Sequence[int]:
        """An answer without the stop tokens at its end."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    @property
    def tool_format(self) -> str:
        """How the model writes tool calls, as `formats.choice.FORMATS` has it."""
        ...
