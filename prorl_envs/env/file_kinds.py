"""File type detection by the first bytes: a command that cannot read a file names its type and its reader."""

import re
from enum import StrEnum
from pathlib import Path

from prorl_envs.errors import WrongFileType

#: Bytes read from the start of a file.
_BYTES = 4096


class FileKind(StrEnum):
    """Kinds of files; the value describes the kind in a sentence."""

    RESULTS = "a file of results"
    STORE = "the store of a service"
    TASKS = "a file of task rows"
    PARQUET = "a Parquet file"
    RUN = "the folder of a run"
    RUN_PART = "a part of the folder of a run"
    SETTINGS = "a YAML file"
    JSON = "JSON of another kind"
    IMAGE = "a sandbox image"
    ARCHIVE = "an archive"
    PICTURE = "a picture"
    PDF = "a PDF"
    HTML = "an HTML page"
    BINARY = "a binary file"
    TEXT = "a text file"
    EMPTY = "empty"
    DIRECTORY = "a directory"


#: Signatures of binary files: offset, bytes, kind.
_MAGIC = (
    (0, b"SQLite format 3\0", FileKind.STORE),
    (0, b"PAR1", FileKind.PARQUET),
    (0, b"hsqs", FileKind.IMAGE),
    (32, b"SIF_MAGIC", FileKind.IMAGE),
    (0, b"PK\x03\x04", FileKind.ARCHIVE),
    (0, b"PK\x05\x06", FileKind.ARCHIVE),
    (0, b"\x1f\x8b", FileKind.ARCHIVE),
    (0, b"BZh", FileKind.ARCHIVE),
    (0, b"\xfd7zXZ\0", FileKind.ARCHIVE),
    (0, b"\x28\xb5\x2f\xfd", FileKind.ARCHIVE),
    (257, b"ustar", FileKind.ARCHIVE),
    (0, b"\x89PNG\r\n", FileKind.PICTURE),
    (0, b"\xff\xd8\xff", FileKind.PICTURE),
    (0, b"GIF8", FileKind.PICTURE),
    (8, b"WEBP", FileKind.PICTURE),
    (0, b"%PDF-", FileKind.PDF),
)
#: Files in the folder of a run, beside its results.
_RESULTS = "results.jsonl"
_RUN_PARTS = frozenset({"run.json", "groups.jsonl", "summary.json"})
_RESULT_FIELDS = (b'"job_id"', b'"group_id"', b'"mask_sample"')
_TASK_FIELDS = (b'"instruction"', b'"directory"', b'"instance_id"', b'"responses_create_params"')
_YAML_KEY = re.compile(rb"(?:#[^\n]*\n|---[^\n]*\n|\s)*[\w.\-]+:(?:\s|$)")

_READERS = {
    FileKind.RESULTS: "`prorl-envs show`, `view`, `compare` and `replay` read results",
    FileKind.STORE: "`prorl-envs show`, `view`, `compare` and `replay` read stores",
    FileKind.RUN: "`prorl-envs show`, `view`, `compare` and `replay` read runs",
    FileKind.TASKS: "`prorl-envs validate`, `tasks --data` and `run --data` read task rows",
    FileKind.PARQUET: "`prorl-envs validate`, `tasks --data` and `run --data` read it as task rows",
    FileKind.RUN_PART: "name the folder that it is in",
    FileKind.SETTINGS: "settings belong to --config",
    FileKind.IMAGE: "`prorl-envs image inspect` reads images",
    FileKind.ARCHIVE: "unpack it first; `prorl-envs image build` reads archives of root file systems",
    FileKind.HTML: "open it in a browser",
}


def kind_of(path: Path) -> FileKind:
    """Return the kind of a file. Anything that is neither a regular file nor a directory, such as a pipe,
    counts as text.

    Raises:
        OSError: the file cannot be read.
    """
    if path.is_dir():
        return FileKind.RUN if (path / _RESULTS).exists() else FileKind.DIRECTORY
    if path.exists() and not path.is_file():
        return FileKind.TEXT
    with path.open("rb") as file:
        start = file.read(_BYTES)
    if not start.strip():
        return FileKind.EMPTY
    for offset, magic, kind in _MAGIC:
        if start.startswith(magic, offset):
            return kind
    return (
        FileKind.BINARY if b"\0" in start else _text_kind(path, start.removeprefix(b"\xef\xbb\xbf").lstrip())
    )


def _text_kind(path: Path, start: bytes) -> FileKind:
    if start.startswith((b"{", b"[")):
        if all(field in start for field in _RESULT_FIELDS):
            return FileKind.RESULTS
        if path.name in _RUN_PARTS and path.with_name(_RESULTS).exists():
            return FileKind.RUN_PART
        return FileKind.TASKS if any(field in start for field in _TASK_FIELDS) else FileKind.JSON
    if start[:14].lower().startswith((b"<!doctype html", b"<html")):
        return FileKind.HTML
    if path.suffix in (".yaml", ".yml") or _YAML_KEY.match(start):
        return FileKind.SETTINGS
    return FileKind.TEXT


def wrong_file(path: Path | str, kind: FileKind, wanted: str, *, hint: str) -> WrongFileType:
    """Return the error for a file that a command does not read.

    Args:
        path: path of the file.
        kind: its kind.
        wanted: kind of file that the command reads, such as "task rows".
        hint: hint for a kind that no command reads.
    """
    problem = f"{path} is {kind}" + ("" if kind is FileKind.EMPTY else f", not {wanted}")
    return WrongFileType(problem, hint=_READERS.get(kind, hint))
