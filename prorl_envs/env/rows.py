"""Reading task data: JSONL or parquet in, tasks out, with every fault named by file, line (or row) and field.

A parquet file (the extra `parquet`) holds a column per field, so a field that some rows lack is null in them:
nulls are left out, at every depth of objects. Elements of lists stay.
"""

import datetime
import decimal
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prorl_envs.env.base import Task
from prorl_envs.env.directories import directory_rows
from prorl_envs.errors import InputError

#: Most bytes of one line of a data file, and most rows of one file.
MAX_LINE_BYTES = 16 * 2**20
MAX_ROWS = 1_000_000
#: Rows of a parquet file that are in memory at a time.
_BATCH_ROWS = 64


def validate_row[TaskT: Task](task_type: type[TaskT], row: Mapping[str, Any]) -> TaskT:
    """Validate one data row against its family's task model.

    Raises:
        InputError: names the first field that is wrong, and how many more are.
    """
    try:
        return task_type.model_validate(dict(row))
    except ValidationError as error:
        raise _input_error(task_type, error) from error


def _input_error(task_type: type[Task], error: ValidationError) -> InputError:
    first, *others = error.errors(include_url=False, include_input=False)
    field = ".".join(str(part) for part in first["loc"]) or "row"
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "extra_forbidden":
        hint = f"the fields of a row are: {', '.join(task_type.model_fields)}"
    else:
        hint = "see the family's README for the row format"
    return InputError(f"{field}: {first['msg']}{more}", hint=hint)


def read_tasks[TaskT: Task](load: Callable[[Mapping[str, Any]], TaskT], path: Path) -> list[TaskT]:
    """Read a data file.

    Args:
        load: makes a task of a row and raises InputError.
        path: the file; JSONL (UTF-8, one JSON object per line, blank lines ignored), or parquet where its
            name ends so; or a directory of tasks (see `directories.py`).

    Raises:
        InputError: `file:line: field: problem`, for unreadable files, bad JSON, bad rows, repeated ids
            and files over the bounds.
    """
    tasks: list[TaskT] = []
    line_of: dict[str, int] = {}
    for number, row in rows(path):
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
    """The objects of a data file with the numbers of their lines, or rows, from 1.

    Raises:
        InputError: as `read_tasks`; or the extra `parquet` is wanted and not installed.
    """
    try:
        if path.is_dir() and (tasks := list(directory_rows(path))):
            yield from tasks
        else:
            yield from _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    except OSError as error:
        hint = "give the path of a JSONL or parquet file"
        raise InputError(f"{path}: {error.strerror or error}", hint=hint) from error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if len(line) > MAX_LINE_BYTES:
                raise InputError(f"{path}:{number}: line: longer than {MAX_LINE_BYTES} bytes")
            if line.strip():
                yield number, _parse(path, number, line)


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InputError(
            f"{path}: parquet needs pyarrow", hint="pip install 'prorl-envs[parquet]', or give JSONL"
        ) from error
    number = 0
    try:
        with path.open("rb") as opened, ParquetFile(opened) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                for row in batch.to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    yield number, _plain_row(path, number, row)
    except (pyarrow.ArrowException, UnicodeDecodeError, KeyError) as error:
        at = f"after row {number}: " if number else ""
        raise InputError(f"{path}: {at}not parquet: {str(error)[:300]}") from error


def _plain_row(path: Path, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    plain = {}
    for name, value in row.items():
        try:
            if value is not None:
                plain[name] = _plain(value)
        except TypeError as error:
            raise InputError(f"{path}:{number}: {name}: {error}", hint="JSON has nothing like it") from None
    if len(json.dumps(plain, ensure_ascii=False)) > MAX_LINE_BYTES:
        raise InputError(f"{path}:{number}: row: longer than {MAX_LINE_BYTES} characters as JSON")
    return plain


def _plain(value: Any) -> Any:
    """A value as JSON would have it, without the nulls of objects."""
    match value:
        case dict():
            return {str(key): _plain(inner) for key, inner in value.items() if inner is not None}
        case list():
            return [_plain(inner) for inner in value]
        case None | bool() | int() | float() | str():
            return value
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return float(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    # ValueError covers bad JSON, bad UTF-8 and over-long integers; RecursionError deep nesting.
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}:{number}: line: not JSON: {error}", hint="one JSON object per line, UTF-8"
        ) from error
    if not isinstance(row, dict):
        raise InputError(f"{path}:{number}: line: a {type(row).__name__}, not a JSON object")
    return row
