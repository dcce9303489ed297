"""Invalid rows of Python data are refused with a message that names the field."""

from typing import Any

import pytest

from prorl_envs.envs.ipython.env import IPythonEnvironment
from prorl_envs.errors import InputError

GOOD: dict[str, Any] = {"id": "a", "instruction": "Find it.", "checks": [{"type": "number", "value": 1}]}


def test_defaults() -> None:
    task = IPythonEnvironment.load(GOOD)
    assert [(name, check.source) for name, check in task.named_checks()] == [("1-number", "finish")]


@pytest.mark.parametrize(
    ("check", "field"),
    [
        ({"type": "number"}, "checks.0.number.value"),
        ({"type": "number", "value": float("nan")}, "checks.0.number.value"),
        ({"type": "number", "value": 1, "rel_tol": -1}, "checks.0.number.rel_tol"),
        ({"type": "number", "value": 1, "source": "variable:a.b"}, "checks.0.number.source"),
        ({"type": "number", "value": 1, "source": "variable:f()"}, "checks.0.number.source"),
        ({"type": "number", "value": 1, "source": "file:/etc/passwd"}, "checks.0.number.source"),
        ({"type": "number", "value": 1, "source": "elsewhere"}, "checks.0.number.source"),
        ({"type": "numbers", "values": []}, "checks.0.numbers.values"),
        ({"type": "expression", "value": "x +", "variables": ["x"]}, "checks.0.expression"),
        ({"type": "expression", "value": "y", "variables": ["x"]}, "checks.0.expression"),
        ({"type": "expression", "value": "log(-x)/0", "variables": ["x"]}, "checks.0.expression"),
        ({"type": "text", "value": ""}, "checks.0.text.value"),
        ({"type": "guess"}, "checks.0"),
    ],
)
def test_a_wrong_check_names_its_field(check: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        IPythonEnvironment.load({**GOOD, "checks": [check]})
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", ""])
def test_files_are_in_the_workspace(name: str) -> None:
    with pytest.raises(InputError, match="files"):
        IPythonEnvironment.load({**GOOD, "files": {name: "x"}})
