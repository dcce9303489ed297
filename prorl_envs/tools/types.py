"""Calls and results of tools: shared by the host side, environments and agents."""

import json
from dataclasses import dataclass, field
from typing import Any

from prorl_envs.strict_json import encodable

type JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """Description of a tool, as sent to the model.

    Args:
        name: function name the model calls.
        description: purpose of the tool, for the model.
        parameters: JSON schema of its arguments (an object schema).
    """

    name: str
    description: str
    parameters: JsonObject

    def to_openai(self) -> JsonObject:
        """Return the tool in OpenAI Chat Completions function format."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call by the model. `arguments` is already parsed, but still untrusted."""

    id: str
    name: str
    arguments: JsonObject

    def to_openai(self) -> JsonObject:
        """Return the call in the form of an OpenAI message."""
        # ASCII escapes keep lone surrogates, which are valid in JSON but not in UTF-8.
        function = {"name": encodable(self.name), "arguments": json.dumps(self.arguments)}
        return {"id": encodable(self.id), "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Result of a tool call.

    Args:
        text: text for the model: valid Unicode of bounded length, which names the number of omitted bytes.
        ok: False if the tool could not do its work (bad arguments, failed edit, timeout). A command that ran
            is `ok`, even if its exit status is not 0.
        data: structured facts (exit_code, cwd, timed_out, ...) for graders, logs and viewers.
        duration_s: seconds from request to answer, measured on the host.
        truncated_bytes: bytes of the output missing from `text`.
    """

    text: str
    ok: bool = True
    data: JsonObject = field(default_factory=dict)
    duration_s: float = 0.0
    truncated_bytes: int = 0

    @property
    def failed(self) -> bool:
        """True if the tool failed, or the command or cell that it ran."""
        return not self.ok or any(map(self.data.get, ("exit_code", "error", "timed_out")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Result of a finished fresh process.

    Args:
        exit_code: exit status, negative for a signal; None if the process ran past its deadline.
        output: stdout and stderr in order of arrival, or stdout alone if stderr was kept apart; bounded.
        timed_out: True if the process was killed at its deadline.
        truncated_bytes: bytes missing from the middle of `output` and `errors`.
        duration_s: seconds the process ran, measured in the sandbox.
        errors: stderr if it was kept apart; bounded.
    """

    exit_code: int | None
    output: bytes
    timed_out: bool
    truncated_bytes: int
    duration_s: float
    errors: bytes = b""
