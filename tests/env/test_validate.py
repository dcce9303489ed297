"""The validator finds tasks that do not discriminate."""

from typing import Any

import pytest

from prorl_envs.env.base import Grade
from prorl_envs.env.node import Node
from prorl_envs.env.validate import ValidationVerdict, judge, validate
from prorl_envs.envs.bash.env import BashEnvironment
from prorl_envs.envs.bash.task import BashTask


def shell(command: str) -> dict[str, Any]:
    return {"tool": "bash", "arguments": {"command": command}}


def task(name: str, **fields: Any) -> BashTask:
    row = {
        "id": name,
        "instruction": "Remove the file f.",
        "files": {"f": "x"},
        "checks": [{"type": "file_absent", "path": "f", "name": "gone"}],
        "reference": [shell("rm f")],
    }
    loaded: BashTask = BashEnvironment.load({**row, **fields})
    return loaded


@pytest.mark.anyio
async def test_the_problem_of_each_task_is_named(node: Node) -> None:
    tasks = [
        task("good"),
        task("no-reference", reference=[]),
        task("generous", files={}),
        task("wrong-reference", reference=[shell("true")]),
        task("refused-call", reference=[{"tool": "no_tool", "arguments": {}}, shell("rm f")]),
        task("ungradable", checks=[{"type": "file_matches", "path": "f", "pattern": "("}]),
        task("unpreparable", setup="exit 1"),
        task("unavailable", requires=["no-such-program"]),
    ]
    seen: list[ValidationVerdict] = []
    verdicts = await validate(BashEnvironment, node, tasks, progress=seen.append)
    assert [verdict.task_id for verdict in verdicts] == [task.id for task in tasks]
    assert sorted(verdict.task_id for verdict in seen) == sorted(task.id for task in tasks)
    said = {verdict.task_id: " ".join(verdict.problems) for verdict in verdicts}
    assert said["good"] == ""
    assert "no reference" in said["no-reference"]
    assert "untouched workspace scores 1" in said["generous"]
    assert (
        'reference scores 0, not 1 (failed: gone): {"name": "gone", "passed": false'
        in said["wrong-reference"]
    )
    assert "reference call 1 (no_tool) was refused" in said["refused-call"]
    assert said["ungradable"].startswith("grader: grep on f")
    assert said["unpreparable"].startswith("environment: setup failed")
    assert [verdict.ok for verdict in verdicts] == [True, *[False] * 7]
    assert verdicts[0].reference == (1.0, 1.0)
    assert verdicts[0].untouched == 0.0
    assert "no-such-program" in verdicts[-1].skipped


def test_a_reference_must_score_the_same_each_time() -> None:
    whole = Grade(reward=1.0, components={"a": 1.0, "b": 0.0})
    other = Grade(reward=1.0, components={"a": 0.0, "b": 1.0})
    assert judge(0.0, [whole, whole]) == []
    assert judge(0.0, [whole, other]) == ["the reference scores differently from run to run"]
