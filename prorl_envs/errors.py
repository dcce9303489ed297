"""The error tree: each class names the boundary that failed.

    ProrlError
    ├── InputError            the caller sent something wrong (bad task row, bad config, bad request)
    └── RolloutFailure        an episode could not be carried through; becomes a typed Failure, never a reward
        ├── SandboxError      the sandbox did not start, or ended while in use
        │   └── SandboxLimit  it was ended because it went beyond one of its limits
        ├── ToolError         the tool server is lost or broke its protocol
        ├── TransferRefused   a tree of files holds what is not carried in or out of a sandbox
        ├── ModelError        the model server failed or answered what it must not
        ├── EnvironmentFault  the environment could not prepare its task
        ├── GraderError       the grader itself failed, so there is no reward
        ├── AgentFault        the harness failed, or never asked its model
        ├── StageTimeout      a stage used up its active time
        ├── NodeLost          the machine that carried it out is gone
        └── Cancelled         somebody asked for the end

What the model may see (its command failed, its edit did not apply) is never one of these: that is an
ordinary tool result. These are our own infrastructure's failures, and the model never sees them.
"""

from enum import StrEnum
from typing import ClassVar


class FailureKind(StrEnum):
    """The boundary at which an episode failed. A closed set, part of the result format."""

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
    """Text that may come from a sandbox, its control characters spelled out: no terminal acts on it."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


class ProrlError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        message: what went wrong, one sentence.
        hint: what the reader can do about it, or empty.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        # For logs and terminals, which a sandbox whose words are in the message must not steer.
        return printable(f"{self.message} (hint: {self.hint})" if self.hint else self.message)


class InputError(ProrlError):
    """The caller sent something wrong: a task row, a configuration, a request."""


class RolloutFailure(ProrlError):
    """An episode could not be carried through. `kind` is the boundary that failed."""

    kind: ClassVar[FailureKind] = FailureKind.INTERNAL
    #: True where another attempt on a fresh sandbox may well succeed.
    retryable: ClassVar[bool] = False


class SandboxError(RolloutFailure):
    """The sandbox did not start, or ended while it was in use."""

    kind = FailureKind.SANDBOX
    retryable = True


class SandboxLimit(SandboxError):
    """The sandbox was ended because it went beyond one of its limits; a fresh one would end the same way."""

    retryable = False


class ToolError(RolloutFailure):
    """The tool server is lost or broke its protocol, and could not be replaced."""

    kind = FailureKind.TOOL
    retryable = True


class TransferRefused(RolloutFailure):
    """A tree of files holds what is not carried in or out of a sandbox, or more than was allowed.

    Out of a sandbox, that is most likely what the agent made of it. A grader that downloads decides what it
    means.
    """

    kind = FailureKind.TOOL


class ModelError(RolloutFailure):
    """The model server failed, or its answer breaks the token protocol."""

    kind = FailureKind.MODEL
    retryable = True


class EnvironmentFault(RolloutFailure):
    """The environment could not prepare its task."""

    kind = FailureKind.ENVIRONMENT


class GraderError(RolloutFailure):
    """The grader itself failed: there is no reward, and none is made up."""

    kind = FailureKind.GRADER


class AgentFault(RolloutFailure):
    """A harness failed, or never asked its model: not the policy's doing, so nothing is graded."""

    kind = FailureKind.AGENT


class StageTimeout(RolloutFailure):
    """A stage used up its active time."""

    kind = FailureKind.TIMEOUT


class NodeLost(RolloutFailure):
    """The machine that carried it out is gone, or does not answer."""

    kind = FailureKind.NODE
    retryable = True


class Cancelled(RolloutFailure):
    """Somebody asked for the end of this episode."""

    kind = FailureKind.CANCELLED
