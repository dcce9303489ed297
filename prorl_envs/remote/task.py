"""NeMo Gym row as a task. The row is sent to the server unchanged, and defines prompt and tools."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from prorl_envs.env.base import Message, Prompt, ReferenceCall, Task
from prorl_envs.env.responses import chat_messages, function_tools
from prorl_envs.env.rows import validate_row
from prorl_envs.errors import InputError
from prorl_envs.tools.types import JsonObject, ToolSpec

#: Names of tools. A tool is a route of the server, so its name must be a single path segment.
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
#: Routes that control an episode. No tool may have their names, since the model chooses which tool is called.
_OWN_ROUTES = frozenset({"seed_session", "close_session", "verify", "aggregate_metrics", "reset", "mcp"})
#: Fields that may contain the id of a row, in order of preference.
_NAMES = ("id", "task_id", "uuid", "instance_id")


class NemoRow(BaseModel):
    """Row of a NeMo Gym data file.

    Args:
        responses_create_params: `input` (messages), `instructions` and `tools`, as in the Responses API.
        reference: tool calls that solve the task, for `prorl-envs validate`; never sent to the server.
        reference_answer: final answer of a model after these calls; never sent to the server.
    """

    model_config = ConfigDict(extra="allow")

    responses_create_params: dict[str, Any]
    reference: tuple[ReferenceCall, ...] = ()
    reference_answer: str = ""


class NemoTask(Task):
    """Parsed row.

    Args:
        row: the row that is sent to the server.
        messages, tools: prompt of the model.
    """

    row: dict[str, Any]
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the schema of the rows that callers send."""
        return NemoRow.model_json_schema(*args, **kwargs)

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return [ToolSpec(**tool) for tool in self.tools]

    def prompt(self) -> Prompt:
        messages: list[Message] = [dict(message) for message in self.messages]
        return Prompt(messages=messages, tools=self.specs)


def read_row(row: Mapping[str, Any]) -> NemoTask:
    """Return a row as a task.

    Raises:
        InputError: a field is missing or invalid. The message names it.
    """
    params = row.get("responses_create_params")
    if not isinstance(params, Mapping):
        raise InputError(
            "responses_create_params: missing, or not an object",
            hint="the tasks of this environment are NeMo Gym rows; `prorl-envs nemo rows` creates some",
        )
    messages, tools = chat_messages(params), function_tools(params)
    _check_names(tools)
    sent_row = {key: value for key, value in row.items() if key not in ("reference", "reference_answer")}
    return validate_row(
        NemoTask,
        {
            "id": _id_of(sent_row),
            "instruction": _instruction(messages),
            "reference": row.get("reference", ()),
            "reference_answer": row.get("reference_answer", ""),
            "row": sent_row,
            "messages": messages,
            "tools": [
                {"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools
            ],
        },
    )


def _check_names(tools: Sequence[ToolSpec]) -> None:
    for number, tool in enumerate(tools):
        where = f"responses_create_params.tools[{number}].name: {tool.name[:100]!r}"
        if not _TOOL_NAME.fullmatch(tool.name) or tool.name in _OWN_ROUTES:
            raise InputError(
                f"{where} cannot be a tool",
                hint="use letters, digits, _ and -, and no name of a NeMo Gym route",
            )
        if any(other.name == tool.name for other in tools[:number]):
            raise InputError(f"{where} is there twice")


def _id_of(row: JsonObject) -> str:
    """Return the id in the row or in its metadata. Without an id, return a hash of the row's content."""
    metadata = row.get("verifier_metadata")
    task = metadata.get("task") if isinstance(metadata, dict) else None
    for place in (row, metadata, task):
        if not isinstance(place, dict):
            continue
        for key in _NAMES:
            if isinstance(name := place.get(key), str | int) and 0 < len(str(name)) <= 200:
                return str(name)
    text = json.dumps(row, sort_keys=True, default=str)
    return "row-" + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _instruction(messages: Sequence[Message]) -> str:
    texts = [message["content"] for message in messages if message["role"] == "user"]
    return str(texts[-1] if texts else messages[-1]["content"]) or "(nothing is asked)"
