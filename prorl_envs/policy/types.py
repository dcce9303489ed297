"""What passes between an agent loop and a model: token ids, never text.

The sampled ids are the truth. A prompt is a list of ids; an answer is the sampled ids with their
log-probabilities; a new observation is rendered as its own ids and appended. Nothing sampled is ever
tokenised again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.tools.types import ToolCall, ToolSpec

type FinishReason = Literal["stop", "length", "abort"]


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


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer of a model server.

    Args:
        ids: the sampled token ids, stop token included where one was sampled.
        logprobs: log-probability of each id under the sampling policy; same length as `ids`.
        finish_reason: why sampling ended.
        weight_version: the version of the weights the server named, or "".
        server: base URL of the server that answered.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: str
    server: str


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """A sampled answer, read.

    Args:
        content: the text outside tool calls.
        tool_calls: the well-formed calls, in order.
        malformed: one message per tool call that could not be read, written for the model.
    """

    content: str
    tool_calls: tuple[ToolCall, ...]
    malformed: tuple[str, ...]


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


class Renderer(Protocol):
    """Turns messages into ids and ids into messages, for one tokenizer and chat template."""

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Sequence[ToolSpec]) -> list[int]:
        """Ids of a conversation's beginning, ready for the first answer."""
        ...

    def bridge(self, sampled: Sampled, observations: Sequence[dict[str, Any]]) -> list[int]:
        """Ids to append after `sampled` so that `observations` (tool or user messages) are read and the
        next answer can begin. Never touches what was sampled; closes a truncated turn."""
        ...

    def parse(self, ids: Sequence[int]) -> AssistantTurn:
        """Read a sampled answer. Total: every id sequence gives a turn."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...
