"""Reading data files: every fault is named by file, line and field."""

import json
from pathlib import Path

import pytest

from prorl_envs.env.base import Task
from prorl_envs.env.rows import MAX_LINE_BYTES, read_tasks, validate_row
from prorl_envs.errors import InputError


def read(path: Path, content: bytes) -> list[Task]:
    file = path / "tasks.jsonl"
    file.write_bytes(content)
    return read_tasks(lambda row: validate_row(Task, row), file)


def line(**fields: object) -> bytes:
    return json.dumps({"id": "a", "instruction": "Do.", **fields}).encode() + b"\n"


def test_rows_in_order_blank_lines_ignored(tmp_path: Path) -> None:
    tasks = read(tmp_path, line() + b"\n  \n" + line(id="b", instruction="Größer 🙂"))
    assert [(task.id, task.instruction) for task in tasks] == [("a", "Do."), ("b", "Größer 🙂")]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (line() + b"{", "tasks.jsonl:2: line: not JSON"),
        (b"\xff\n", "tasks.jsonl:1: line: not JSON"),
        (b"[" * 100_000, "tasks.jsonl:1: line: not JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "tasks.jsonl:1: line: not JSON"),
        (b"[1]", "tasks.jsonl:1: line: a list"),
        (line(id=""), "tasks.jsonl:1: id: "),
        (line(id=7), "tasks.jsonl:1: id: "),
        (line(extra=1), "tasks.jsonl:1: extra: "),
        (line() + line(id="b") + line(), "tasks.jsonl:3: id: 'a' is already on line 1"),
        (line(reference=[{"tool": "bash"}]), "tasks.jsonl:1: reference.0.arguments: "),
        (b'{"id": "' + b"x" * MAX_LINE_BYTES + b'"}', "tasks.jsonl:1: line: longer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, content)
    assert says in caught.value.message


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_tasks(lambda row: validate_row(Task, row), tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="Is a directory"):
        read_tasks(lambda row: validate_row(Task, row), tmp_path)
