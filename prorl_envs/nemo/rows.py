"""Conversion of task rows to NeMo Gym rows: `responses_create_params` for the agent, the task for the
grader."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator

from prorl_envs.catalog import Catalog
from prorl_envs.config import load_settings
from prorl_envs.env.base import Environment
from prorl_envs.env.node import Node
from prorl_envs.env.registry import family
from prorl_envs.env.rows import rows
from prorl_envs.errors import InputError, SandboxError
from prorl_envs.sandbox.base import Sandbox, SandboxSpec
from prorl_envs.tools.types import JsonObject, ToolSpec

#: Prefix of the folders under `resources_servers/` and of all instance names in the configs.
PREFIX = "prorl_"


#: Fields of a row that solve its task.
_SOLUTION = frozenset({"reference", "reference_answer"})
#: Fields of a NeMo Gym row or request beside the task.
_FRAMEWORK_KEYS = frozenset({"responses_create_params", "agent_ref", "task_source", "response"})
#: Families that ship with a resources server.
BUILT_IN = ("bash", "code", "ipython", "math", "stem", "swebench", "terminal")


def server_name(environment: str) -> str:
    """Return the name of a family's resources server, such as `prorl_bash`; prefixed because NeMo Gym has one
    flat namespace."""
    return PREFIX + environment


def agent_name(environment: str) -> str:
    """Return the name of the agent instance in a family's default config."""
    return f"{server_name(environment)}_simple_agent"


def nemo_row(environment: Environment[Any], row: Mapping[str, Any]) -> JsonObject:
    """Render one task row; pure.

    Args:
        environment: an instance that has not been started.
        row: the family's task row. Its `reference` is omitted, but other columns may reveal the solution (a
            SWE-bench row its patch), so `verifier_metadata` is for servers, never for a template.

    Raises:
        InputError: the row is invalid.
    """
    prompt = environment.prompt(environment.load(row))
    return {
        "responses_create_params": {
            "input": [dict(message) for message in prompt.messages],
            "tools": [response_tool(spec) for spec in prompt.tools],
        },
        "verifier_metadata": {"task": {key: value for key, value in row.items() if key not in _SOLUTION}},
        "agent_ref": {"type": "responses_api_agents", "name": agent_name(environment.name)},
    }


def task_row(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the task row of a request.

    Args:
        body: a NeMo Gym row with `verifier_metadata.task`, alone or in the `task_data` of a typed seed (0.7).
            There, the metadata may be merged into the row (`task`), and the task row may stand alone.

    Raises:
        InputError: the request has no task row.
    """
    content = body.get("task_data", body)
    if isinstance(content, Mapping):
        metadata = content.get("verifier_metadata", content)
        row = metadata.get("task") if isinstance(metadata, Mapping) else None
        if isinstance(row, Mapping):
            return row
        alone = {key: value for key, value in content.items() if not _is_framework_key(key)}
        if metadata is content and row is None and alone:
            return alone
    raise InputError(
        "verifier_metadata.task: missing, or not an object", hint="make the rows with `prorl-envs nemo rows`"
    )


def _is_framework_key(key: str) -> bool:
    return key in _FRAMEWORK_KEYS or key.startswith("_ng_")


def task_data(environment: str) -> type[BaseModel]:
    """Return the schema of a family's rows, for the `task_data.py` of its server: NeMo Gym (0.7) validates
    data sets with it. Rows are valid in each format that the family reads."""
    chosen = family(environment)
    # NeMo Gym reads this mark to place the field into today's rows.
    place = Field(
        description="Row of the family.", json_schema_extra={"legacy_location": "verifier_metadata"}
    )
    read = field_validator("task", mode="before")(lambda cls, row: chosen.load(row))
    return create_model(
        "TaskData",
        __config__=ConfigDict(extra="allow"),
        __validators__={"read": read},
        task=(chosen.task_type, place),
    )


def response_tool(spec: ToolSpec) -> JsonObject:
    """Convert a tool to the Responses API's flat format."""
    return {
        "type": "function",
        "name": spec.name,
        "description": spec.description,
        "parameters": spec.parameters,
        "strict": False,
    }


def blank(environment: str) -> Environment[Any]:
    """Return an instance of a family that can only describe its tools and prompts.

    Raises:
        InputError: there is no such family.
    """
    return unstarted(family(environment))


def unstarted(chosen: type[Environment[Any]]) -> Environment[Any]:
    """Return an instance of a class that can only describe its tools and prompts."""
    return chosen(Node(_NoDriver(), Path()))


def render(environment: str, source: Path, config: Path | None = None) -> str:
    """Render a data file as NeMo Gym JSONL text.

    Args:
        environment: name of the family, or of an environment in `config`.
        source: its data file.
        config: YAML file of settings with `environments`.

    Raises:
        InputError: unknown environment, or invalid data file (names file, line and field).
    """
    offered = Catalog.of(load_settings(config))
    offered.tasks(environment, source)  # raises errors with file and line
    instance = unstarted(offered.family(environment))
    task_rows = (nemo_row(instance, row) for _, row in rows(source))
    return jsonl(task_rows)


def jsonl(objects: Iterable[Mapping[str, Any]]) -> str:
    """Serialise objects as JSON Lines."""
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in objects)


def write_rows(environment: str, source: Path, target: Path, config: Path | None = None) -> int:
    """Convert the data file `source` of an environment to NeMo Gym's row format; `config` as in `render`.

    Returns:
        The number of rows written.

    Raises:
        InputError: as `render`.
    """
    text = render(environment, source, config)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return text.count("\n")


class _NoDriver:
    """Driver that starts nothing, because rendering rows needs only data."""

    name = "none"
    sandboxes: Collection[Sandbox] = ()

    async def start(self, spec: SandboxSpec) -> Sandbox:
        raise SandboxError("rendering rows starts no sandbox")

    async def aclose(self) -> None:
        pass
