"""What tools are called with and what they return: shared by the host side, environments and agents."""

from dataclasses import dataclass, field
from typing import Any

type JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model is told of it.

    Args:
        name: function name the model calls.
        description: what it does, for the model.
        parameters: JSON schema of its arguments (an object schema).
    """

    name: str
    description: str
    parameters: JsonObject

    def to_openai(self) -> JsonObject:
        """The tool in OpenAI Chat Completions function format."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model made. `arguments` is already parsed; it is still hostile."""

    id: str
    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What came back from a tool.

    Args:
        text: what the model sees; bounded, valid Unicode, says what was cut.
        ok: False where the tool could not do what was asked (bad arguments, failed edit, timeout). A
            command with a non-zero exit status is `ok`: it ran.
        data: structured facts (exit_code, cwd, timed_out, ...) for graders, logs and viewers.
        duration_s: seconds from request to answer, host to host.
        truncated_bytes: how much of the output was left out of `text`.
    """

    text: str
    ok: bool = True
    data: JsonObject = field(default_factory=dict)
    duration_s: float = 0.0
    truncated_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A fresh process that has ended.

    Args:
        exit_code: its status, negative for a signal; None where it ran past its deadline.
        output: stdout and stderr as they came, or stdout alone where they were to be apart; bounded.
        timed_out: whether the deadline ended it.
        truncated_bytes: how much is missing from the middle of `output` and `errors`.
        duration_s: seconds it ran, measured beside it.
        errors: stderr where it was to be apart; bounded.
    """

    exit_code: int | None
    output: bytes
    timed_out: bool
    truncated_bytes: int
    duration_s: float
    errors: bytes = b""
