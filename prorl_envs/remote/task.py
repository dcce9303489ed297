"""A NeMo Gym row as a task: sent to the server unchanged, and the source of prompt and tools."""

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

#: A tool is a route of the server, so its name must be a single path segment.
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
#: Routes that control an episode. An agent posts to the route that the model names, so these are excluded.
_OWN_ROUTES = frozenset({"seed_session", "close_session", "verify", "aggregate_metrics", "reset", "mcp"})
#: Fields that may name a row, in order of preference.
_NAMES = ("id", "task_id", "uuid", "instance_id")


class NemoRow(BaseModel):
    """A row of a NeMo Gym data file.

    Args:
        responses_create_params: `input` (messages), `instructions` and `tools`, as for the Responses API.
        reference: tool calls that solve the task, for `prorl-envs validate`; never sent to the server.
        reference_answer: the model's final answer after these calls.
    """

    model_config = ConfigDict(extra="allow")

    responses_create_params: dict[str, Any]
    reference: tuple[ReferenceCall, ...] = ()
    reference_answer: str = ""


class NemoTask(Task):
    """A parsed row.

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


def read_row(given: Mapping[str, Any]) -> NemoTask:
    """Read a row.

    Raises:
        InputError: names the field that is wrong.
    """
    params = given.get("responses_create_params")
    if not isinstance(params, Mapping):
        raise InputError(
            "responses_create_params: missing, or not an object",
            hint="the tasks of this environment are NeMo Gym rows; `prorl-envs nemo rows` makes some",
        )
    messages, tools = chat_messages(params), function_tools(params)
    _check_names(tools)
    row = {key: value for key, value in given.items() if key not in ("reference", "reference_answer")}
    return validate_row(
        NemoTask,
        {
            "id": _id_of(row),
            "instruction": _instruction(messages),
            "reference": given.get("reference", ()),
            "reference_answer": given.get("reference_answer", ""),
            "row": row,
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
                f"{where} cannot be a tool", hint="letters, digits, _ and -; no route of NeMo Gym's"
            )
        if any(other.name == tool.name for other in tools[:number]):
            raise InputError(f"{where} is there twice")


def _id_of(row: JsonObject) -> str:
    """Return the id in the row's top level or metadata, else a hash of the row's content."""
    metadata = row.get("verifier_metadata")
    own = metadata.get("task") if isinstance(metadata, dict) else None
    for place in (row, metadata, own):
        if not isinstance(place, dict):
            continue
        for key in _NAMES:
            if isinstance(name := place.get(key), str | int) and 0 < len(str(name)) <= 200:
                return str(name)
    text = json.dumps(row, sort_keys=True, default=str)
    return "row-" + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _instruction(messages: Sequence[Message]) -> str:
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return str(asked[-1] if asked else messages[-1]["content"]) or "(nothing is asked)"
