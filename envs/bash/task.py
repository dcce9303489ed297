"""Row format of shell data files."""

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from prorl_envs.env.base import Task
from prorl_envs.env.scoring import CheckModel, Scoring, check_names
from prorl_envs.env.task_files import Files, RelativePath, Text, contents, encodable

#: Maximum total size of a task's initial files, in bytes.
MAX_FILES_BYTES = 8 * 2**20
#: Top-level directories that cannot be or contain a workspace.
_SYSTEM = frozenset({
    "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "logs", "proc", "root", "run", "sbin", "submission",
    "sys", "tests", "tmp", "usr", "var",
})  # fmt: skip


def _valid_workdir(path: str) -> str:
    """Return the path of a workspace; raise ValueError if it is in a directory of the system."""
    parts = PurePosixPath(path).parts
    if len(parts) < 2 or ".." in parts or parts[1] in _SYSTEM or not re.fullmatch(r"[\w./-]+", path):
        raise ValueError(f"{path!r} cannot be the workspace")
    return str(PurePosixPath(path))


Workdir = Annotated[str, Field(pattern=r"^/", max_length=200), AfterValidator(_valid_workdir)]
Script = Annotated[str, Field(min_length=1, max_length=100_000), AfterValidator(encodable)]


class CommandCheck(CheckModel):
    """Check that a command exits with the given status and, if `stdout` is given, prints exactly that.

    `stdout` never enters the sandbox, so the command and the agent's programs that it runs cannot read the
    expected output. Trailing white space does not count.
    """

    type: Literal["command"]
    command: Script
    exit_code: int = Field(default=0, ge=0, le=255)
    stdout: Text | None = None
    timeout_s: float = Field(default=30.0, gt=0, le=600)


class FileCheck(CheckModel):
    """Base of the checks on one file."""

    path: RelativePath


class FileEquals(FileCheck):
    """Check that the file holds exactly `text`; trailing white space of the file does not count."""

    type: Literal["file_equals"]
    text: Text


class FileContains(FileCheck):
    """Check that the file holds each of `texts`."""

    type: Literal["file_contains"]
    texts: tuple[Text, ...] = Field(min_length=1)


class FileMatches(FileCheck):
    """Check that a line of the file matches `pattern`, an extended regular expression (`grep -E`)."""

    type: Literal["file_matches"]
    pattern: Script


class FileJson(FileCheck):
    """Check that the file is JSON equal to `value`; order of keys and white space do not count."""

    type: Literal["file_json"]
    value: Any


class FileAbsent(FileCheck):
    """Check that the path does not exist, not even as a dangling link."""

    type: Literal["file_absent"]


class TestsCheck(CheckModel):
    """Check by test code, whose files are written to /tests of the grading sandbox after the agent's end.

    `reward` names the file in /logs/verifier to which the test code writes its result, a number from 0 to 1.
    Without `reward`, exit status 0 counts as 1 and any other exit status as 0.
    """

    type: Literal["tests"]
    files: Files = Field(min_length=1, max_length=500)
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
        workdir: path of the workspace.
        files: initial contents of the workspace, by relative path: a text, or a `TaskFile`.
        requires: programs that the task needs; if one is missing, the episode fails with EnvironmentFault.
        setup: bash script that runs in the workspace before the episode, as the agent's user.
        checks: the graded checks; they run in a fresh sandbox with a copy of the workspace.
        scoring: `all` (default): 1 if every check passes, else 0; `weighted`: share of passed weights.
    """

    workdir: Workdir = "/workspace"
    files: Files = Field(default_factory=dict, max_length=1000)
    requires: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.+-]*$", max_length=100)], ...] = ()
    setup: Annotated[str, Field(max_length=100_000), AfterValidator(encodable)] = ""
    checks: tuple[Check, ...] = Field(min_length=1, max_length=200)
    scoring: Scoring = Scoring.ALL

    @model_validator(mode="after")
    def _consistent(self) -> "BashTask":
        self.named_checks()
        if sum(len(content) for _, content, _ in self.contents()) > MAX_FILES_BYTES:
            raise ValueError(f"the files are larger than {MAX_FILES_BYTES} bytes together")
        return self

    def named_checks(self) -> list[tuple[str, Check]]:
        """Return the checks with unique names."""
        names = check_names(self.checks, [check.type for check in self.checks])
        return list(zip(names, self.checks, strict=True))

    def contents(self) -> list[tuple[str, bytes, bool]]:
        """Return path, bytes and executability of each file."""
        return contents(self.files)
