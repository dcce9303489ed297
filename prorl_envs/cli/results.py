"""Stored results: one JSON object a line, in the service's result format."""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from prorl_envs.errors import InputError
from prorl_envs.rollout.types import Result

_ELSEWHERE = "choose another place: --out"


def read_results(path: Path) -> Iterator[Result]:
    """Results of a JSONL file, in order.

    Raises:
        InputError: no such file, or a line that is no result; names the line.
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
                yield Result.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"]) or "line"
                raise InputError(
                    f"{path}:{number}: not a rollout result: {where}: {first['msg']}",
                    hint="this command reads the results.jsonl that `run` and `demo` write",
                ) from error


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


def write_results(path: Path, results: Iterable[Result]) -> None:
    """Write results as JSONL, replacing the file only once all are written."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as lines:
        lines.writelines(result.model_dump_json() + "\n" for result in results)
    partial.replace(path)
