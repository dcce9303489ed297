"""Example files that NeMo Gym requires of a resources server.

data/example.jsonl            the first five tasks as NeMo Gym rows
data/example_rollouts.jsonl   output of `gym eval run` for them, without values that differ between runs
data/example_metrics.json     output of `gym dataset collate --mode example_validation` for them
tests/verifier_cases.jsonl    the first rollout as the cases of a verifier fixture (NeMo Gym 0.7)
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from prorl_envs.env.base import Environment
from prorl_envs.env.registry import example_path
from prorl_envs.env.rows import rows
from prorl_envs.errors import InputError
from prorl_envs.nemo.rows import blank, jsonl, nemo_row
from prorl_envs.tools.types import JsonObject

#: Exact number of rows that NeMo Gym requires.
COUNT = 5
EXAMPLE = "data/example.jsonl"
ROLLOUTS = "data/example_rollouts.jsonl"
METRICS = "data/example_metrics.json"
CASES = "tests/verifier_cases.jsonl"

#: Evidence that differs between two runs of one solution: times, memory, and a log with times in it.
_MEASURED = frozenset({"seconds", "memory", "log_tail"})


def write_examples(environment: str, folder: Path, rollouts: Path | None = None) -> None:
    """Write the example files of a server's folder, except the metrics.

    Args:
        environment: name of the family.
        folder: the server's folder.
        rollouts: output of `gym eval run` on the folder's example rows; None writes only the rows.

    Raises:
        InputError: the family has fewer than five example tasks, or the rollouts do not match the rows.
    """
    example_tasks = example_rows(blank(environment), example_path(environment))
    write_jsonl(folder / EXAMPLE, example_tasks)
    if rollouts is None:
        return
    recorded = example_rollouts(read_jsonl(rollouts))
    if [rollout["_ng_task_index"] for rollout in recorded] != list(range(COUNT)):
        raise InputError(
            f"{rollouts}: not one rollout for each of the {COUNT} rows", hint=f"run only {EXAMPLE}"
        )
    if recorded[0]["reward"] != 1.0:
        raise InputError(
            f"{rollouts}: the reward of the first rollout is {recorded[0]['reward']}, not 1",
            hint="the verifier's cases need a solved task: repeat this rollout",
        )
    write_jsonl(folder / ROLLOUTS, recorded)
    write_jsonl(folder / CASES, verifier_cases(example_tasks[0], recorded[0]))


def example_rows(environment: Environment[Any], source: Path) -> list[JsonObject]:
    """Return the first tasks of a data file as NeMo Gym rows.

    Raises:
        InputError: there are fewer than five.
    """
    example_tasks = [nemo_row(environment, row) for _, row in islice(rows(source), COUNT)]
    if len(example_tasks) < COUNT:
        raise InputError(f"{source}: {len(example_tasks)} tasks", hint=f"NeMo Gym requires {COUNT} examples")
    return example_tasks


def example_rollouts(results: Iterable[Mapping[str, Any]]) -> list[JsonObject]:
    """Return rollouts in the order of their rows, without values that differ between runs."""
    ordered = sorted(results, key=lambda result: int(result["_ng_task_index"]))
    return [
        dict(result)
        | {
            "response": result["response"] | {"created_at": 0.0},
            "evidence": _without_measurements(result["evidence"]),
        }
        for result in ordered
    ]


def verifier_cases(row: Mapping[str, Any], rollout: Mapping[str, Any]) -> list[JsonObject]:
    """Return the cases that NeMo Gym requires, for an example row and its rollout with the full reward."""
    request = {key: value for key, value in row.items() if key != "agent_ref"}
    full = request | {"response": rollout["response"]}
    closing = [item for item in rollout["response"]["output"] if item["type"] == "message"][-1:]
    idle = request | {"response": rollout["response"] | {"output": closing}}
    return [
        {"name": "solved", "kind": "full_reward", "request": full, "expected_reward": 1.0},
        {"name": "nothing done", "kind": "zero_reward", "request": idle, "expected_reward": 0.0},
        {
            "name": "no task",
            "kind": "malformed",
            "request": full | {"verifier_metadata": {}},
            "expected_error": "verifier_metadata.task",
        },
        {"name": "solved again", "kind": "determinism", "request": full, "expected_reward": 1.0},
    ]


def read_jsonl(path: Path) -> list[JsonObject]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]


def write_jsonl(path: Path, objects: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(jsonl(objects), "utf-8")


def _without_measurements(evidence: Any) -> Any:
    if isinstance(evidence, Mapping):
        return {key: _without_measurements(value) for key, value in evidence.items() if key not in _MEASURED}
    if isinstance(evidence, list):
        return [_without_measurements(value) for value in evidence]
    return evidence
