"""Results to export: solved, wrong and failed ones of two environments."""

from pathlib import Path
from typing import Any

import pytest

from prorl_envs.rollout.api.types import Result
from tests.viewer.conftest import result, written

_PROPERTIES: dict[str, dict[str, Any]] = {
    "bash": {"command": {"type": "string"}},
    "editor": {"path": {"type": "string"}, "lines": {"type": "array", "items": {"type": "integer"}}},
}
#: Their parameters have nothing in common, so a reader that merges them into one type loses or adds fields.
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use {name}.",
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }
    for name, properties in _PROPERTIES.items()
]
FAILED: dict[str, Any] = {
    "state": "failed",
    "reward": None,
    "mask_sample": True,
    "stop_reason": None,
    "failure": {"kind": "sandbox", "stage": "init", "message": 'no "space",\nnor inodes; ümlaut'},
    "trajectory": None,
    "components": {},
    "evidence": {},
}


@pytest.fixture
def results() -> list[Result]:
    return [
        result("run/bash/fix-it/0", tools=TOOLS, metadata={"step": 7}),
        result("run/bash/fix-it/1", tools=TOOLS, reward=0.25),
        result("run/bash/fix-it/2", tools=TOOLS, messages=[], **FAILED),
        result("run/math-solver/sum/0", environment="math@solver", task_id="sum", components={"a": 0.5}),
    ]


@pytest.fixture
def source(tmp_path: Path, results: list[Result]) -> Path:
    return written(tmp_path / "results.jsonl", *results)
