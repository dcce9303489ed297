"""The error tree: each class names the boundary that failed.

    ProrlError
    ├── InputError            the caller sent something wrong (bad task row, bad config, bad request)
    │   ├── WrongFileType     a file of a type that the command does not read
    │   └── NoExampleData     an environment without example tasks of its own
    └── RolloutFailure        an episode failed; becomes a typed Failure, never a reward
        ├── SandboxError      the sandbox did not start, or stopped while in use
        │   ├── SandboxLimit  the sandbox was killed because it exceeded one of its limits
        │   │   └── SandboxMemoryLimit  that of its memory
        │   └── UnsupportedMachine  no sandbox can start on this machine
        ├── ToolError         the tool server is lost or broke its protocol
        ├── TransferRefused   a file tree contains entries that cannot be copied into or out of a sandbox
        ├── ModelError        the model server failed or gave an invalid answer
        ├── EnvironmentFault  the environment could not prepare its task
        ├── GraderError       the grader itself failed, so there is no reward
        ├── AgentFault        the harness failed, or never called its model
        ├── StageTimeout      a stage used up its active time
        ├── NodeLost          the machine that ran the job is gone
        └── Cancelled         the episode was cancelled on request

Failures that the model may see (its command failed, its edit did not apply) are ordinary tool results and
never one of these errors. These errors are failures of our infrastructure, and the model never sees them.
"""

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

#: Maximum names that a hint lists if none is close.
_MOST_NAMES = 20


class FailureKind(StrEnum):
    """Boundary at which an episode failed. A closed set, part of the result format."""

    SANDBOX = "sandbox"
    TOOL = "tool"
    MODEL = "model"
    ENVIRONMENT = "environment"
    GRADER = "grader"
    AGENT = "agent"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    NODE = "node"
    INTERNAL = "internal"


def printable(text: str) -> str:
    """Escape the control characters of a text, which may come from a sandbox, for display in a terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def name_hint(name: str, known: Iterable[str]) -> str:
    """Return a hint for a name that does not exist: the closest names, or some of the existing names.

    Args:
        name: as the caller wrote it.
        known: the names that exist.
    """
    import difflib  # only an error needs it

    names = sorted(known)
    by_folded = {known_name.casefold(): known_name for known_name in names}
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=3, cutoff=0.7)
    close = [by_folded[match] for match in matches]
    if close:
        return f"did you mean {' or '.join(close)}?"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"known: {', '.join(names[:_MOST_NAMES]) or 'none'}{more}"


def causes_of(error: BaseException) -> list[str]:
    """Return the exceptions that led to an error, nearest first, each as `Type: message`. Printable."""
    causes: list[str] = []
    seen = {id(error)}
    cause = error.__cause__ or error.__context__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        causes.append(printable(f"{type(cause).__name__}: {cause}".removesuffix(": ")))
        cause = cause.__cause__ or cause.__context__
    return causes


class ProrlError(Exception):
    """Base class of every error that this package raises on purpose.

    Args:
        message: description of the problem, one sentence.
        hint: remedy for the reader, or empty.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        # The message may contain text from a sandbox, which must not control a terminal.
        return printable(f"{self.message} (hint: {self.hint})" if self.hint else self.message)


class InputError(ProrlError):
    """Invalid input from the caller: a task row, a configuration, a request."""


def expand_user(path: str | Path) -> Path:
    """Replace `~` or `~name` at the start of a path by a home directory.

    Raises:
        InputError: there is no such home directory.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # no such user; or neither HOME nor an entry in /etc/passwd
        start = Path(path).parts[0]
        raise InputError(
            f"{path}: {start} has no home directory",
            hint=f"set HOME, or write the whole path; for a folder with this name, ./{start}",
        ) from error


class WrongFileType(InputError):
    """A file of a type that the command does not read; the hint names the command that reads it."""


class NoExampleData(InputError):
    """An environment without example tasks of its own."""


class RolloutFailure(ProrlError):
    """Failure of an episode. `kind` is the boundary that failed."""

    kind: ClassVar[FailureKind] = FailureKind.INTERNAL
    #: True if another attempt on a fresh sandbox may succeed.
    retryable: ClassVar[bool] = False


class SandboxError(RolloutFailure):
    """Failure of a sandbox: it did not start, or stopped while it was in use."""

    kind = FailureKind.SANDBOX
    retryable = True


class NoRoom(SandboxError):
    """Sandbox that cannot start before another one closes, because a limit of this machine is reached."""


class SandboxLimit(SandboxError):
    """Sandbox that was killed because it exceeded one of its limits; a fresh sandbox would exceed it too."""

    retryable = False


class SandboxMemoryLimit(SandboxLimit):
    """Sandbox that was killed for memory, because killing its processes was no help."""


class UnsupportedMachine(SandboxError):
    """Machine on which no sandbox can start, or no driver offers what was requested."""

    retryable = False


class ToolError(RolloutFailure):
    """Loss or protocol error of the tool server, which could not be replaced."""

    kind = FailureKind.TOOL
    retryable = True


class TransferRefused(RolloutFailure):
    """File tree with entries that cannot be copied into or out of a sandbox, or with more data than allowed.

    For a copy out of a sandbox, the agent most likely created these entries. A grader that downloads files
    decides how to handle this error.
    """

    kind = FailureKind.TOOL


class ModelError(RolloutFailure):
    """Failure of the model server, or an answer that breaks the token protocol."""

    kind = FailureKind.MODEL
    retryable = True


class EnvironmentFault(RolloutFailure):
    """Failure of the environment to prepare its task."""

    kind = FailureKind.ENVIRONMENT


class GraderError(RolloutFailure):
    """Failure of the grader itself: there is no reward, and none is made up."""

    kind = FailureKind.GRADER


class AgentFault(RolloutFailure):
    """Harness that failed, or never called its model. The policy is not at fault, so nothing is graded."""

    kind = FailureKind.AGENT


class StageTimeout(RolloutFailure):
    """Timeout of a stage: its active time is used up."""

    kind = FailureKind.TIMEOUT


class NodeLost(RolloutFailure):
    """Loss of the machine that ran the job: it is gone, or does not answer."""

    kind = FailureKind.NODE
    retryable = True


class Cancelled(RolloutFailure):
    """Cancellation of the episode, on request."""

    kind = FailureKind.CANCELLED
