"""The rows of a shell data file."""

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from prorl_envs.env.base import Task
from prorl_envs.env.scoring import CheckModel, Scoring, check_names

#: Most bytes of all files of one task, as they are written into its workspace.
MAX_FILES_BYTES = 8 * 2**20
#: Where no workspace can be.
_SYSTEM = frozenset({
    "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "logs", "proc", "root", "run", "sbin", "submission",
    "sys", "tests", "tmp", "usr", "var",
})  # fmt: skip


def _inside(path: str) -> str:
    """A relative path that stays in the workspace."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} is not a relative path inside the workspace")
    return path


def _encodable(text: str) -> str:
    """Text that a file or a command line can hold."""
    if "\0" in text or re.search("[\ud800-\udfff]", text):
        raise ValueError("holds a NUL or a lone surrogate")
    return text


def _own(path: str) -> str:
    """An absolute path that is none of the system's."""
    parts = PurePosixPath(path).parts
    if len(parts) < 2 or ".." in parts or parts[1] in _SYSTEM or not re.fullmatch(r"[\w./-]+", path):
        raise ValueError(f"{path!r} cannot be the workspace")
    return str(PurePosixPath(path))


Workdir = Annotated[str, Field(pattern=r"^/", max_length=200), AfterValidator(_own)]
WorkspacePath = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_inside)]
Text = Annotated[str, Field(max_length=1_000_000), AfterValidator(_encodable)]
Script = Annotated[str, Field(min_length=1, max_length=100_000), AfterValidator(_encodable)]


class WorkspaceFile(BaseModel):
    """A file of the workspace where its text alone does not say enough.

    Args:
        text: its content, or
        base64: its bytes.
        executable: whether it may be run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: Text | None = None
    base64: str | None = Field(default=None, max_length=8_000_000)
    executable: bool = False

    @model_validator(mode="after")
    def _one_content(self) -> "WorkspaceFile":
        if (self.text is None) == (self.base64 is None):
            raise ValueError("give either text or base64")
        try:
            self.content()
        except binascii.Error as error:
            raise ValueError(f"base64: {error}") from error
        return self

    def content(self) -> bytes:
        if self.base64 is not None:
            return base64.b64decode(self.base64, validate=True)
        return (self.text or "").encode()


class CommandCheck(CheckModel):
    """A command ends with the exit status, and where `stdout` is given, prints exactly that.

    `stdout` never enters the sandbox: the agent's own programs, run by the command, cannot read what is
    expected of them. Trailing white space does not count.
    """

    type: Literal["command"]
    command: Script
    exit_code: int = Field(default=0, ge=0, le=255)
    stdout: Text | None = None
    timeout_s: float = Field(default=30.0, gt=0, le=600)


class FileCheck(CheckModel):
    """The base of checks on one file."""

    path: WorkspacePath


class FileEquals(FileCheck):
    """The file holds exactly `text`; trailing white space of the file does not count."""

    type: Literal["file_equals"]
    text: Text


class FileContains(FileCheck):
    """The file holds each of `texts`."""

    type: Literal["file_contains"]
    texts: tuple[Text, ...] = Field(min_length=1)


class FileMatches(FileCheck):
    """Some line of the file matches `pattern`, an extended regular expression as of `grep -E`."""

    type: Literal["file_matches"]
    pattern: Script


class FileJson(FileCheck):
    """The file is JSON equal to `value`; order of keys and white space do not count."""

    type: Literal["file_json"]
    value: Any


class FileAbsent(FileCheck):
    """Nothing is at the path, not even a dangling link."""

    type: Literal["file_absent"]


class TestsCheck(CheckModel):
    """Test code runs beside the workspace: the files lie in /tests, and came after the agent had gone.

    Passed as far as it says: `reward` names the file in /logs/verifier into which it writes a number from 0
    to 1. Without one, its exit status 0 is 1 and any other 0.
    """

    type: Literal["tests"]
    files: dict[WorkspacePath, Text | WorkspaceFile] = Field(min_length=1, max_length=500)
    command: Script
    reward: Annotated[str, Field(pattern=r"^/logs/verifier/[\w.-]+$")] | None = None
    timeout_s: float = Field(default=120.0, gt=0, le=3600)


type Check = Annotated[
    CommandCheck | FileEquals | FileContains | FileMatches | FileJson | FileAbsent | TestsCheck,
    Field(discriminator="type"),
]


class BashTask(Task):
    """One shell task.

    Args:
        workdir: where the workspace is.
        files: what the workspace holds at first, by relative path: a text, or a `WorkspaceFile`.
        requires: programs the task needs; where one is missing the episode fails to start, typed.
        setup: a bash script run in the workspace before the episode, as the agent's user.
        checks: what is graded, in a fresh sandbox with a copy of the workspace.
        scoring: `all` (default): 1 where every check passes, else 0; `weighted`: share of passed weights.
    """

    workdir: Workdir = "/workspace"
    files: dict[WorkspacePath, Text | WorkspaceFile] = Field(default_factory=dict, max_length=1000)
    requires: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.+-]*$", max_length=100)], ...] = ()
    setup: Annotated[str, Field(max_length=100_000), AfterValidator(_encodable)] = ""
    checks: tuple[Check, ...] = Field(min_length=1, max_length=200)
    scoring: Scoring = Scoring.ALL

    @model_validator(mode="after")
    def _consistent(self) -> "BashTask":
        self.named_checks()
        if sum(len(content) for _, content, _ in self.contents()) > MAX_FILES_BYTES:
            raise ValueError(f"the files are larger than {MAX_FILES_BYTES} bytes together")
        return self

    def named_checks(self) -> list[tuple[str, Check]]:
        """The checks, each under a name of its own."""
        names = check_names(self.checks, [check.type for check in self.checks])
        return list(zip(names, self.checks, strict=True))

    def contents(self) -> list[tuple[str, bytes, bool]]:
        """Path, bytes and executability of each file."""
        return contents(self.files)


def contents(files: Mapping[str, str | WorkspaceFile]) -> list[tuple[str, bytes, bool]]:
    """Path, bytes and executability of each file."""
    return [
        (path, file.encode(), False) if isinstance(file, str) else (path, file.content(), file.executable)
        for path, file in files.items()
    ]
