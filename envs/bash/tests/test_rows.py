"""Invalid rows of shell data are refused with a message that names the field."""

from typing import Any

import pytest

from prorl_envs.envs.bash.env import BashEnvironment
from prorl_envs.errors import InputError

GOOD: dict[str, Any] = {
    "id": "a",
    "instruction": "Do it.",
    "checks": [{"type": "file_absent", "path": "x"}],
}


def test_defaults() -> None:
    task = BashEnvironment.load(GOOD)
    assert task.scoring == "all"
    assert [name for name, _ in task.named_checks()] == ["1-file_absent"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": ""}, "id"),
        ({"instruction": ""}, "instruction"),
        ({"checks": []}, "checks"),
        ({"checks": [{"type": "magic"}]}, "checks.0"),
        ({"checks": [{"type": "file_absent", "path": "/etc/passwd"}]}, "checks.0.file_absent.path"),
        ({"checks": [{"type": "file_absent", "path": "a/../../b"}]}, "checks.0.file_absent.path"),
        ({"checks": [{"type": "file_absent", "path": "a\0b"}]}, "checks.0.file_absent.path"),
        ({"checks": [{"type": "file_absent", "path": "x", "weight": 0}]}, "checks.0.file_absent.weight"),
        ({"checks": [{"type": "file_absent", "path": "x", "weight": float("inf")}]}, "checks.0.file_absent"),
        (
            {"checks": [{"type": "command", "command": "true", "timeout_s": 1e9}]},
            "checks.0.command.timeout_s",
        ),
        ({"checks": [{"type": "command", "command": "a\0b"}]}, "checks.0.command.command"),
        ({"checks": [{"type": "file_absent", "path": "x", "name": "n"}] * 2}, "row"),
        ({"files": {"/abs": "x"}}, "files"),
        ({"files": {"a": {"text": "x", "base64": "eA=="}}}, "files.a"),
        ({"files": {"a": {"base64": "not base64!"}}}, "files.a"),
        ({"files": {"a": "\ud800"}}, "files.a"),
        ({"requires": ["../../bin/sh"]}, "requires.0"),
        ({"scoring": "most"}, "scoring"),
        ({"reward": 1}, "reward"),
    ],
)
def test_a_wrong_row_names_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        BashEnvironment.load({**GOOD, **change})
    assert caught.value.message.startswith(field)
    assert caught.value.hint


def test_the_total_size_of_files_is_bounded() -> None:
    files = {f"f{n}": "x" * 1_000_000 for n in range(9)}
    with pytest.raises(InputError, match="larger than"):
        BashEnvironment.load({**GOOD, "files": files})
