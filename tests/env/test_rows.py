"""Reading of data files; every error names file, line and field."""

import codecs
import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from prorl_envs.env.base import Task
from prorl_envs.env.directories import directory_rows
from prorl_envs.env.rows import MAX_LINE_BYTES, read_tasks, rows, validate_row
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


def test_an_array_is_read_like_lines(tmp_path: Path) -> None:
    tasks = read(tmp_path, b"\n [" + line() + b"," + line(id="b") + b"]\n")
    assert [task.id for task in tasks] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (line() + b"{", "tasks.jsonl:2: line: not JSON"),
        (b"\xff\n", "tasks.jsonl:1: line: not JSON"),
        (b"[" * 100_000, "tasks.jsonl: not JSON"),
        (b"[" + line() + b"] []", "tasks.jsonl: not JSON"),
        (b"[" + line() + b",7]", "tasks.jsonl:2: row: a int"),
        (b"[" + line() + b"," + line(id=7) + b"]", "tasks.jsonl:2: id: "),
        (b'{"n": ' + b"9" * 5000 + b"}", "tasks.jsonl:1: line: not JSON"),
        (line() + b"[1]", "tasks.jsonl:2: line: a list"),
        (line(id=""), "tasks.jsonl:1: id: "),
        (line(id=7), "tasks.jsonl:1: id: "),
        (line(extra=1), "tasks.jsonl:1: extra: "),
        (line() + line(id="b") + line(), "tasks.jsonl:3: id: 'a' is already on line 1"),
        (line(reference=[{"tool": "bash"}]), "tasks.jsonl:1: reference.0.arguments: "),
        (b'{"id": "' + b"x" * MAX_LINE_BYTES + b'"}', "tasks.jsonl:1: line: longer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_is_located(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, content)
    assert says in caught.value.message


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_tasks(lambda row: validate_row(Task, row), tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="is a directory"):
        read_tasks(lambda row: validate_row(Task, row), tmp_path)


def parquet(path: Path, *given: dict[str, Any]) -> Path:
    file = path / "tasks.parquet"
    columns = {name: [row.get(name) for row in given] for row in given for name in row}
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file


def test_parquet_is_read_like_jsonl(tmp_path: Path) -> None:
    """Nulls in objects are missing fields: a Parquet column exists for every row."""
    given: list[dict[str, Any]] = [
        {"id": "a", "instruction": "Größer 🙂", "reference": [{"tool": "t", "arguments": {"x": "1"}}]},
        {"id": "b", "instruction": "Do.", "reference_answer": "42"},
    ]
    lines = tmp_path / "tasks.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in given))
    assert list(rows(parquet(tmp_path, *given))) == list(rows(lines)) == list(enumerate(given, start=1))


def test_parquet_with_many_rows_and_value_types(tmp_path: Path) -> None:
    day = datetime.datetime(2024, 5, 6, 7, 8)
    given = [{"n": n, "list": [1.5, None], "day": day, "d": decimal.Decimal("0.5")} for n in range(1000)]
    found = list(rows(parquet(tmp_path, *given)))
    assert [number for number, _ in found] == list(range(1, 1001))
    assert found[999][1] == {"n": 999, "list": [1.5, None], "day": "2024-05-06T07:08:00", "d": 0.5}


def test_an_error_in_parquet_is_located_by_its_row(tmp_path: Path) -> None:
    good = {"id": "a", "instruction": "Do."}
    file = parquet(tmp_path, good, {**good, "extra": 1})
    with pytest.raises(InputError, match=r"tasks.parquet:2: extra: "):
        read_tasks(lambda row: validate_row(Task, row), file)
    with pytest.raises(InputError, match=r"tasks.parquet:1: id: a value of type bytes"):
        read_tasks(lambda row: validate_row(Task, row), parquet(tmp_path, {**good, "id": b"a"}))
    with pytest.raises(InputError, match=r"tasks.parquet:1: row: longer"):
        list(rows(parquet(tmp_path, {**good, "instruction": "x" * MAX_LINE_BYTES})))


@pytest.mark.parametrize("cut", [0, 4, 200, -20])
def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path, cut: int) -> None:
    content = parquet(tmp_path, {"id": "a"}).read_bytes()
    (tmp_path / "tasks.parquet").write_bytes(content[:cut] + b"PAR1")
    with pytest.raises(InputError, match=r"tasks.parquet: "):
        list(rows(tmp_path / "tasks.parquet"))


def test_task_directories_belong_to_the_environment_terminal(tmp_path: Path) -> None:
    task = tmp_path / "greet"
    task.mkdir()
    (task / "task.toml").write_text("")
    with pytest.raises(InputError) as caught:
        read_tasks(lambda row: validate_row(Task, row), tmp_path)
    assert "directory: " in caught.value.message and "`terminal`" in caught.value.hint


def test_task_directories_with_links_or_large_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text("")
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="link: not a regular file"):
        list(directory_rows(tmp_path))
    (tmp_path / "link").unlink()
    (tmp_path / "big").write_bytes(b"\0" * (9 << 20))
    with pytest.raises(InputError, match="more than"):
        list(directory_rows(tmp_path))


def narrow(kind: str, *values: Any) -> Any:
    return pyarrow.array(values, getattr(pyarrow, kind)())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([decimal.Decimal(12345678901234567890123), decimal.Decimal(-7)], [12345678901234567890123, -7]),
        (
            [decimal.Decimal("0.12345678901234567890"), decimal.Decimal("0.5")],
            ["0.12345678901234567890", 0.5],
        ),
        ([{"x": [decimal.Decimal(2**70)]}], [{"x": [2**70]}]),
        (narrow("float32", 0.1, 16777216.0, 3e38), [0.1, 16777216.0, 3e38]),
        (pyarrow.array([[0.1]], pyarrow.list_(pyarrow.float32())), [[0.1]]),
        (narrow("float16", 0.1, 65504.0, float("inf")), [0.1, 65504.0, float("inf")]),
        (narrow("uint64", 2**64 - 1), [2**64 - 1]),
        ([datetime.date(2024, 5, 6)], ["2024-05-06"]),
        ([{"expected": None, "other": None}], [{"expected": None}]),
        (pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int8())), [{"a": 1}]),
    ],
)
def test_values_of_parquet_are_exact(tmp_path: Path, values: Any, expected: list[Any]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"v": values}), tmp_path / "tasks.parquet")
    found = [row["v"] for _, row in rows(tmp_path / "tasks.parquet")]
    assert json.dumps(found) == json.dumps(expected)


@pytest.mark.parametrize(
    "values",
    [
        [b"a", b"b"],
        [datetime.timedelta(1)] * 2,
        pyarrow.array([[("a", 1), ("a", 2)]] * 2, pyarrow.map_(pyarrow.string(), pyarrow.int8())),
    ],
)
def test_columns_without_a_form_in_json_may_be_unused(
    tmp_path: Path, values: Any, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tasks.parquet"
    texts = {"id": ["a", "b"], "instruction": ["x", "y"]}
    pyarrow.parquet.write_table(pyarrow.table({**texts, "image": values}), file)
    assert [row for _, row in rows(file)] == [
        {"id": "a", "instruction": "x"}, {"id": "b", "instruction": "y"}
    ]  # fmt: skip
    assert caplog.text.count("column image: left out") == 1
    used = {**texts, "instruction": values}
    pyarrow.parquet.write_table(pyarrow.table(used), file)
    with pytest.raises(InputError, match=r":1: instruction: a value of type "):
        read_tasks(lambda row: validate_row(Task, row), file)


def test_only_the_nested_part_without_a_form_in_json_is_left_out(tmp_path: Path) -> None:
    given = {"prompt": [{"content": "x", "image": {"bytes": b"a", "path": "p"}}], "images": [b"a"]}
    [(_, row)] = rows(parquet(tmp_path, given))
    assert row == {"prompt": [{"content": "x", "image": {"path": "p"}}], "images": [None]}


@pytest.mark.parametrize("text", ['[{"id": "a"}]', ' \n[{"id": "a"}]', '{"id": "a"}\n'])
def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_bytes(codecs.BOM_UTF8 + text.encode())
    assert [row for _, row in rows(tmp_path / "t.json")] == [{"id": "a"}]


def test_utf_16_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"id": "a"}\n', "utf-16")
    with pytest.raises(InputError, match="a binary file, not task rows"):
        list(rows(tmp_path / "t.jsonl"))
