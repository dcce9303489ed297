"""Tasks as directories, in the formats of Harbor and Terminal-Bench; each becomes a row that holds its files.

    Harbor          task.toml  instruction.md  environment/Dockerfile  tests/test.sh      solution/solve.sh
    Terminal-Bench  task.yaml                  Dockerfile              run-tests.sh tests/  solution.sh

A row is `{"id": ..., "directory": {PATH: TEXT, or {"base64": ..., "executable": ...}}}`, so that it can be
sent to a service like any other row. A family that supports such rows converts them to its own.
"""

import base64
import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prorl_envs.errors import InputError

#: Files that mark a directory as a task.
MARKS = ("task.toml", "task.yaml")
#: Maximum number of files of one task, and maximum total bytes.
MAX_FILES = 500
MAX_BYTES = 8 * 2**20

type Content = str | dict[str, Any]


def directory_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the tasks of a directory, numbered from 1: the directory itself if it is a task, else its tasks
    by name.

    Raises:
        InputError: a task is too large, or holds something that is not a regular file.
        OSError: something cannot be read.
    """
    found = (
        [path]
        if is_task_directory(path)
        else sorted(inner for inner in path.iterdir() if is_task_directory(inner))
    )
    for number, task in enumerate(found, start=1):
        yield number, {"id": task.resolve().name, "directory": _files(task)}


def is_task_directory(path: Path) -> bool:
    """Return True if the directory holds a file that marks a task."""
    return any((path / mark).is_file() for mark in MARKS)


def _files(task: Path) -> dict[str, Content]:
    files: dict[str, Content] = {}
    size = 0
    for folder, _, names in sorted(os.walk(task)):
        for name in sorted(names):
            path = Path(folder, name)
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"{path}: not a regular file", hint="a task may hold only files and folders")
            size += status.st_size
            if size > MAX_BYTES or len(files) >= MAX_FILES:
                raise InputError(f"{task}: more than {MAX_BYTES} bytes, or {MAX_FILES} files")
            content = _content(path.read_bytes(), executable=bool(status.st_mode & 0o100))
            files[str(path.relative_to(task))] = content
    return files


def _content(data: bytes, *, executable: bool) -> Content:
    with contextlib.suppress(UnicodeDecodeError):
        text = data.decode()
        if "\0" not in text:
            return {"text": text, "executable": True} if executable else text
    return {"base64": base64.b64encode(data).decode(), "executable": executable}
