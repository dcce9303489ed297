"""Result files: one JSON object per line, in the service's result format."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.types import Result

RESULTS = "results.jsonl"
#: File beside the results: the requested groups, with the rows of their tasks.
GROUPS = "groups.jsonl"
_OTHER_PATH = "choose another path with --out"


def results_file(path: Path | str) -> Path:
    """Return the results file at `path`: the file itself, or `results.jsonl` in the folder of a run."""
    path = Path(path)
    return path / RESULTS if path.is_dir() else path


def read_results(path: Path | str) -> Iterator[Result]:
    """Read results in the order of the file.

    Args:
        path: a JSONL file, or the folder of a run.

    Raises:
        InputError: there is no such file, or a line is not a result. The message names the line.
    """
    return (result for _, result in located_results(path))


def located_results(path: Path | str) -> Iterator[tuple[str, Result]]:
    """Read results like `read_results`, and yield each with its location, `path:line`."""
    for where, result in lines_of(results_file(path), Result.model_validate_json):
        if isinstance(result, str):
            raise InputError(
                f"{where}: not a rollout result: {result}",
                hint="this command reads a results.jsonl of `run` or `demo`; if the run was killed, "
                "`run --resume` removes an unfinished last line",
            )
        yield where, result


def lines_of[T: BaseModel](path: Path, parse: Callable[[bytes], T]) -> Iterator[tuple[str, T | str]]:
    """Yield the objects in a JSONL file, or the error messages of invalid lines, each with `path:line`.

    Args:
        parse: parses a line; raises ValidationError if the line is invalid.

    Raises:
        InputError: the file cannot be read.
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
                yield f"{path}:{number}", parse(line)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"]) or "line"
                yield f"{path}:{number}", f"{where}: {first['msg']}"


def ready(path: Path) -> Path:
    """Check that results can be written to a path, and return the path. Creates its folder.

    Raises:
        InputError: the results cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise InputError(f"cannot write {path}: it is a folder", hint=_OTHER_PATH)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}", hint=_OTHER_PATH) from error


def write_results(path: Path, results: Iterable[BaseModel]) -> None:
    """Write results or requests as JSONL. The file is replaced when all of them are written.

    Raises:
        InputError: the file cannot be written.
    """
    partial = path.with_suffix(".partial")
    try:
        with partial.open("w", encoding="utf-8") as lines:
            lines.writelines(result.model_dump_json() + "\n" for result in results)
        partial.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}", hint=_OTHER_PATH) from error
