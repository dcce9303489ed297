"""Task rows as NeMo Gym rows: `responses_create_params` for the agent, the task for the grader."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from prorl_envs.env.base import Environment
from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path, family, load_tasks
from prorl_envs.env.rows import rows
from prorl_envs.errors import InputError, SandboxError
from prorl_envs.sandbox.base import Sandbox, SandboxSpec
from prorl_envs.sandbox.snapshot import Snapshot
from prorl_envs.tools.types import JsonObject, ToolSpec

#: Folder under `resources_servers/`, first part of every instance name in the configs.
PREFIX = "prorl_"


#: Fields of a row that solve its task.
_SOLUTION = frozenset({"reference", "reference_answer"})
#: The families that ship with a resources server.
BUILT_IN = ("bash", "code", "ipython", "math", "stem", "swebench")


def server_name(environment: str) -> str:
    """Name of a family's resources server: `prorl_bash`. Prefixed, as NeMo Gym's names are one flat space."""
    return PREFIX + environment


def agent_name(environment: str) -> str:
    """Name of the agent instance in a family's default config."""
    return f"{server_name(environment)}_simple_agent"


def nemo_row(environment: Environment[Any], row: Mapping[str, Any]) -> JsonObject:
    """Render one task row; pure.

    Args:
        environment: an instance that has not been started.
        row: the family's task row. Its `reference` is left out; other columns may tell the solution all the
            same (a SWE-bench row its patch), so `verifier_metadata` is for servers, never for a template.

    Raises:
        InputError: the row is wrong.
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
    """The task row within a request that carries a NeMo Gym row.

    Raises:
        InputError: there is none.
    """
    metadata = body.get("verifier_metadata")
    row = metadata.get("task") if isinstance(metadata, Mapping) else None
    if not isinstance(row, Mapping):
        raise InputError(
            "verifier_metadata.task: missing, or not an object",
            hint="make the rows with `prorl-envs nemo rows`",
        )
    return row


def response_tool(spec: ToolSpec) -> JsonObject:
    """A tool in the Responses API's flat format."""
    return {
        "type": "function",
        "name": spec.name,
        "description": spec.description,
        "parameters": spec.parameters,
        "strict": False,
    }


def blank(environment: str) -> Environment[Any]:
    """An instance of a family that can say what it offers, and starts nothing.

    Raises:
        InputError: there is no such family.
    """
    return unstarted(family(environment))


def unstarted(chosen: type[Environment[Any]]) -> Environment[Any]:
    """An instance of a class that can say what it offers, and starts nothing."""
    return chosen(Node(_NoDriver(), Path()))


def render(environment: str, source: Path) -> str:
    """A family's data file as NeMo Gym JSONL text.

    Raises:
        InputError: an unknown family, or a bad data file (with file, line and field).
    """
    load_tasks(environment, source)  # names file and line of every fault
    instance = blank(environment)
    made = (nemo_row(instance, row) for _, row in rows(source))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)


def write_rows(environment: str, source: Path, target: Path) -> int:
    """Convert the data file `source` of a family to NeMo Gym's row format.

    Returns:
        The number of rows written.

    Raises:
        InputError: as `render`.
    """
    text = render(environment, source)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return text.count("\n")


def refresh_examples() -> None:
    """Render `data/nemo_example.jsonl` of every built-in family again, after its examples changed."""
    for environment in BUILT_IN:
        source = example_path(environment)
        write_rows(environment, source, source.with_name("nemo_example.jsonl"))


class _NoDriver:
    """Rows are rendered from data alone; nothing is started for it."""

    name = "none"
    sandboxes: Collection[Sandbox] = ()

    async def start(self, spec: SandboxSpec, *, snapshot: Snapshot | None = None) -> Sandbox:
        raise SandboxError("rendering rows starts no sandbox")

    async def aclose(self) -> None:
        pass
