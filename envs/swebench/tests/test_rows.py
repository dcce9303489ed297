"""Rows of SWE-bench are read, and errors in hostile rows name the column."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path
from prorl_envs.envs.swebench.diffs import changed_paths
from prorl_envs.envs.swebench.env import SwebenchEnvironment
from prorl_envs.envs.swebench.task import SwebenchTask, reference_calls
from prorl_envs.errors import InputError

OUTSIDE = "--- a/../../x\n+++ b/../../x\n@@ -1 +1 @@\n-a\n+b\n"


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    with example_path("swebench").open() as file:
        return dict(json.loads(file.readline()))


def with_environment(row: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {**row, "x_env": {**row["x_env"], **changes}}


def test_the_examples_cover_three_repositories(tasks: Mapping[str, SwebenchTask]) -> None:
    assert {task.repo for task in tasks.values()} == {
        "psf/requests",
        "marshmallow-code/marshmallow",
        "pytest-dev/pytest",
    }


def test_three_examples_of_two_repositories_build_on_a_supported_python(
    tasks: Mapping[str, SwebenchTask],
) -> None:
    modern = [
        task
        for task in tasks.values()
        if task.environment and {"3.12", "3.13"} <= set(task.environment.pythons)
    ]
    assert len(modern) >= 3
    assert len({task.repo for task in modern}) >= 2


def test_lists_of_tests_are_json_text_or_lists(row: dict[str, Any]) -> None:
    as_text = SwebenchEnvironment.load(row)
    assert isinstance(row["PASS_TO_PASS"], str)
    as_list = SwebenchEnvironment.load({**row, "PASS_TO_PASS": json.loads(row["PASS_TO_PASS"])})
    assert as_text == as_list
    assert len(as_text.pass_to_pass) > 100


def test_a_task_is_restored_from_its_dump(row: dict[str, Any]) -> None:
    task = SwebenchEnvironment.load(row)
    assert SwebenchEnvironment.load(task.model_dump(mode="json")) == task


@pytest.mark.anyio
async def test_the_agent_sees_the_problem_and_neither_hints_nor_answers(
    row: dict[str, Any], node: Node
) -> None:
    row = {**row, "hints_text": "the-hint"}
    task = SwebenchEnvironment.load(row)
    seen = json.dumps([dict(message) for message in SwebenchEnvironment(node).prompt(task).messages])
    assert json.dumps(task.instruction)[1:-1] in seen
    assert "the-hint" not in seen
    assert task.fail_to_pass[0] not in seen
    assert "diff --git" not in seen


def test_the_reference_is_made_from_the_patch(row: dict[str, Any]) -> None:
    task = SwebenchEnvironment.load(row)
    assert task.reference == reference_calls(task.patch)
    assert [call.tool for call in task.reference] == ["bash", "finish"]


def test_a_patch_cannot_escape_its_quotation() -> None:
    command = reference_calls("a\nEND_OF_PATCH\nb\n")[0].arguments["command"]
    assert command.rstrip().endswith("\nEND_OF_PATCH_")


def test_changed_paths_are_old_and_new_names() -> None:
    diff = (
        "--- a/old.py\n+++ b/new.py\n@@ -1 +1 @@\n-a\n+b\n--- /dev/null\n+++ b/made.py\n@@ -0,0 +1 @@\n+x\n"
    )
    assert changed_paths(diff) == {"old.py", "new.py", "made.py"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"instance_id": "../../etc"}, "id"),
        ({"instance_id": ""}, "id"),
        ({"repo": "psf"}, "repo"),
        ({"base_commit": "HEAD; rm -rf /"}, "base_commit"),
        ({"problem_statement": ""}, "problem_statement"),
        ({"problem_statement": "a\0b"}, "problem_statement"),
        ({"problem_statement": "\ud800"}, "problem_statement"),
        ({"patch": "not a diff"}, "patch"),
        ({"patch": OUTSIDE}, "patch"),
        ({"patch": 7}, "patch"),
        ({"test_patch": OUTSIDE}, "test_patch"),
        ({"test_patch": "@@ -1,5 +1,5 @@\n a\n"}, "test_patch"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": "{"}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": [1]}, "FAIL_TO_PASS"),
        ({"PASS_TO_PASS": '["a"], "items": ["b"]'}, "PASS_TO_PASS"),
        ({"eval_script": "echo"}, "eval_script"),
        ({"log_parser": "os.system"}, "log_parser"),
        ({"eval_type": "fail_never"}, "eval_type"),
        ({"image": "docker://x y"}, "image"),
        ({"x_env": []}, "x_env"),
    ],
)
def test_a_bad_column_is_named(row: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        SwebenchEnvironment.load({**row, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pip": ["--index-url=http://evil"]}, "pip"),
        ({"pip": ["pytest"]}, "pip"),
        ({"pip": ["pytest>=1"]}, "pip"),
        ({"pip": ["evil @ https://evil/x.whl"]}, "pip"),
        ({"pip": ["/etc/passwd==1"]}, "pip"),
        ({"sdist": "git+https://evil/x"}, "sdist"),
        ({"sdist": "requests==2.27.0; rm -rf /"}, "sdist"),
        ({"release_tag": "--delete"}, "release_tag"),
        ({"release_tag": "1.0 $(id)"}, "release_tag"),
        ({"pythons": []}, "pythons"),
        ({"pythons": ["/bin/sh"]}, "pythons"),
        ({"pythons": ["2.7"]}, "pythons"),
        ({"install": ""}, "install"),
        ({"docker": True}, "docker"),
    ],
)
def test_a_bad_environment_is_named(row: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        SwebenchEnvironment.load(with_environment(row, **changes))
