"""Stored results: one JSON object a line, in the service's result format."""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

from prorl_envs.errors import InputError
from prorl_envs.rollout.types import Result

#: Beside a results.jsonl: what was asked for, with the tasks' rows.
GROUPS = "groups.jsonl"
_ELSEWHERE = "choose another place: --out"


def read_results(path: Path | str) -> Iterator[Result]:
    """Results of a JSONL file, in order.

    Raises:
        InputError: no such file, or a line that is no result; names the line.
    """
    for where, result in lines_of(Path(path), Result):
        if isinstance(result, str):
            raise InputError(
                f"{where}: not a rollout result: {result}",
                hint="this command reads the results.jsonl that `run` and `demo` write",
            )
        yield result


def lines_of[T: BaseModel](path: Path, model: type[T]) -> Iterator[tuple[str, T | str]]:
    """The objects of a JSONL file, each with `path:line`; or, for a line that is none, what is wrong with it.

    Raises:
        InputError: no such file.
    """
    try:
        lines = path.open("rb")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="name a results.jsonl") from error
    with lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", model.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"]) or "line"
                yield f"{path}:{number}", f"{where}: {first['msg']}"


def ready(path: Path) -> Path:
    """The path, once it is certain that results can be written there: its folder is made, a file tried.

    Raises:
        InputError: they cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise InputError(f"cannot write {path}: it is a folder", hint=_ELSEWHERE)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}", hint=_ELSEWHERE) from error


def write_results(path: Path, results: Iterable[BaseModel]) -> None:
    """Write results, or requests, as JSONL, replacing the file only once all are written."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as lines:
        lines.writelines(result.model_dump_json() + "\n" for result in results)
    partial.replace(path)
