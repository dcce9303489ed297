"""Reader for task data: JSON lines, one JSON array, or Parquet; errors name file, line and field."""

import codecs
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prorl_envs.env.base import Task
from prorl_envs.env.directories import directory_rows
from prorl_envs.env.file_kinds import FileKind, kind_of, wrong_file
from prorl_envs.env.parquet import Unreadable, parquet_rows, readable
from prorl_envs.errors import InputError, WrongFileType

#: Maximum bytes of one line of a data file, and maximum rows of one file.
MAX_LINE_BYTES = 16 * 2**20
MAX_ROWS = 1_000_000
#: Maximum bytes of a file that is one JSON array, because it is read into memory at once.
MAX_ARRAY_BYTES = 2**29
#: Kinds of files that are parsed as JSON. Text files are included so that the error names a line.
_READ = frozenset({FileKind.TASKS, FileKind.JSON, FileKind.TEXT})


def validate_row[TaskT: Task](task_type: type[TaskT], row: Mapping[str, Any]) -> TaskT:
    """Validate one data row against its family's task model.

    Raises:
        InputError: names the first field that is wrong, and the number of further errors.
    """
    if "directory" in row and "directory" not in task_type.model_fields:
        raise InputError(
            "directory: this environment has no tasks of this kind",
            hint="the environment `terminal` runs task directories of Harbor and Terminal-Bench",
        )
    try:
        return task_type.model_validate(dict(row))
    except ValidationError as error:
        raise _input_error(task_type, error) from error


def _input_error(task_type: type[Task], error: ValidationError) -> InputError:
    first, *others = error.errors(include_url=False)
    field = ".".join(str(part) for part in first["loc"]) or "row"
    more = f" (and {len(others)} more)" if others else ""
    if isinstance(first["input"], Unreadable):
        return InputError(f"{field}: {first['input'].problem}", hint=first["input"].hint)
    if first["type"] == "extra_forbidden":
        hint = f"the fields of a row are: {', '.join(task_type.model_fields)}"
    else:
        hint = "see the family's README for the row format"
    return InputError(f"{field}: {first['msg']}{more}", hint=hint)


def read_tasks[TaskT: Task](load: Callable[[Mapping[str, Any]], TaskT], path: Path) -> list[TaskT]:
    """Read a data file.

    Args:
        load: converts a row to a task and raises InputError.
        path: the file; JSONL (UTF-8, one JSON object per line, blank lines ignored), or one JSON array of
            objects, or Parquet; or a directory of tasks (see `directories.py`).

    Raises:
        InputError: `file:line: field: problem`, for unreadable files, bad JSON, bad rows, repeated ids and
            files over the bounds; WrongFileType for files of another type.
    """
    tasks: list[TaskT] = []
    line_of: dict[str, int] = {}
    for number, row in _rows(path):
        try:
            task = load(row)
        except InputError as error:
            raise InputError(f"{path}:{number}: {error.message}", hint=error.hint) from error
        if task.id in line_of:
            raise InputError(
                f"{path}:{number}: id: {task.id!r} is already on line {line_of[task.id]}",
                hint="ids must be unique in a file",
            )
        line_of[task.id] = number
        tasks.append(task)
        if len(tasks) > MAX_ROWS:
            raise InputError(f"{path}:{number}: more than {MAX_ROWS} rows", hint="split the file")
    return tasks


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a data file with their line or row numbers, from 1.

    Raises:
        InputError: as `read_tasks`; or the extra `parquet` is needed and not installed.
    """
    return ((number, readable(row)) for number, row in _rows(path))


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows like `rows`, but with the unreadable values of Parquet files."""
    try:
        kind = kind_of(path)
        if path.is_dir() and (tasks := list(directory_rows(path))):
            yield from tasks
        elif kind is FileKind.PARQUET or (path.suffix == ".parquet" and path.is_file()):
            yield from parquet_rows(path, MAX_LINE_BYTES)
        elif kind in _READ:
            yield from _json_rows(path)
        elif kind is FileKind.DIRECTORY:
            raise WrongFileType(
                f"{path} is a directory that holds no task directories",
                hint="a task directory of Harbor or Terminal-Bench has a task.toml or task.yaml; "
                "or give the path of a JSONL or Parquet file",
            )
        else:
            raise wrong_file(path, kind, "task rows", hint="give the path of a JSONL or Parquet file")
    except OSError as error:
        hint = "give the path of a JSONL or parquet file"
        raise InputError(f"{path}: {error.strerror or error}", hint=hint) from error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        if file.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            yield from _array_rows(path, file.read(MAX_ARRAY_BYTES + 1))
            return
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if len(line) > MAX_LINE_BYTES:
                raise InputError(f"{path}:{number}: line: longer than {MAX_LINE_BYTES} bytes")
            if line.strip():
                where = f"{path}:{number}: line"
                yield number, _object(where, _parse(where, line))


def _array_rows(path: Path, text: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    if len(text) > MAX_ARRAY_BYTES:
        hint = "one JSON object per line has no such bound"
        raise InputError(f"{path}: an array of more than {MAX_ARRAY_BYTES} bytes", hint=hint)
    for number, row in enumerate(_parse(f"{path}", text), start=1):
        yield number, _object(f"{path}:{number}: row", row)


def _parse(where: str, text: bytes) -> Any:
    # ValueError covers bad JSON, bad UTF-8 and too long integers; RecursionError covers deep nesting.
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = "one JSON object per line, or an array of them, UTF-8"
        raise InputError(f"{where}: not JSON: {error}", hint=hint) from error


def _object(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise InputError(f"{where}: a {type(row).__name__}, not a JSON object")
    return row
