"""Outcome of a command, with notices for its caller. Imports nothing of NeMo Gym."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools.types import Completed

#: Status that NeMo Gym's own providers return if no process has an exit status.
NO_STATUS = 125
#: Maximum notices of limits that are kept for one command.
_NOTICES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcome:
    """Outcome of a command.

    Args:
        stdout, stderr: output, bounded. stderr ends with notices, for example about killed processes.
        return_code: exit status, 128 and more for a signal; NO_STATUS with an `error`.
        error: `timeout`; `sandbox`, if the sandbox failed; `exec`, if the command could not be started; None
            if the command finished.
    """

    stdout: str
    stderr: str
    return_code: int
    error: str | None = None


class Notices:
    """Distribution of a sandbox's limit notices to all running commands, because any of them may be affected.
    A notice that arrives while no command runs is delivered to the next command."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._listening: list[deque[str]] = []

    @contextmanager
    def listen(self) -> Iterator[Callable[[], list[str]]]:
        """Collect notices during one command. Yield a function that returns the notices so far, without
        duplicates."""
        collected: deque[str] = deque(maxlen=_NOTICES)
        self._listening.append(collected)

        def so_far() -> list[str]:
            for notice in self._sandbox.pop_notices():
                for notices in self._listening:
                    notices.append(notice)
            return list(dict.fromkeys(collected))

        try:
            yield so_far
        finally:
            self._listening = [each for each in self._listening if each is not collected]


def outcome(done: Completed, timeout_s: float, notices: list[str]) -> EpisodeOutcome:
    """Return the outcome of a finished command for its caller."""
    stdout, stderr = (data.decode("utf-8", "replace") for data in (done.output, done.errors))
    if done.exit_code is None:
        stderr = with_notes(stderr, [*notices, f"[the command was ended after {timeout_s:g} s]"])
        return EpisodeOutcome(stdout=stdout, stderr=stderr, return_code=NO_STATUS, error="timeout")
    status = done.exit_code if done.exit_code >= 0 else 128 - done.exit_code
    return EpisodeOutcome(stdout=stdout, stderr=with_notes(stderr, notices), return_code=status)


def failed(kind: str, message: str) -> EpisodeOutcome:
    """Return an outcome without an exit status; `kind` is its `EpisodeOutcome.error`."""
    return EpisodeOutcome(stdout="", stderr=message, return_code=NO_STATUS, error=kind)


def with_notes(text: str, notes: list[str]) -> str:
    """Append notes to `text`, each on its own line; return it unchanged if there are none."""
    if not notes:
        return text
    separator = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{separator}{'\n'.join(notes)}"
