"""How a command ended, and what its caller is told beside. Imports nothing of NeMo Gym."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools.types import Completed

#: What NeMo Gym's own providers answer where no process gave an exit status.
NO_STATUS = 125
#: Notices of limits kept for one command.
_NOTICES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended.

    Args:
        stdout, stderr: what it wrote, bounded. stderr ends with what was done to the sandbox's processes.
        return_code: its exit status, 128 and more for a signal; NO_STATUS with an `error`.
        error: `timeout`; `sandbox`, where the sandbox failed; `exec`, where the command could not be
            started; None where the command ran to its end.
    """

    stdout: str
    stderr: str
    return_code: int
    error: str | None = None


class Notices:
    """What is done to keep a sandbox's limits, for every command that is under way meanwhile: it may be any
    of them that suffers. What is done while there is none, the next is told."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._listening: list[deque[str]] = []

    @contextmanager
    def listen(self) -> Iterator[Callable[[], list[str]]]:
        """For the time of one command; what it is given answers with the sentences so far, each once."""
        heard: deque[str] = deque(maxlen=_NOTICES)
        self._listening.append(heard)

        def so_far() -> list[str]:
            self._take()
            return list(dict.fromkeys(heard))

        try:
            yield so_far
        finally:
            self._listening = [each for each in self._listening if each is not heard]

    def _take(self) -> None:
        for notice in self._sandbox.take_notices():
            for heard in self._listening:
                heard.append(notice)


def outcome(done: Completed, timeout_s: float, notices: list[str]) -> Outcome:
    """What a finished command's caller is answered."""
    stdout, stderr = (data.decode("utf-8", "replace") for data in (done.output, done.errors))
    if done.exit_code is None:
        stderr = with_notes(stderr, [*notices, f"[the command was ended after {timeout_s:g} s]"])
        return Outcome(stdout=stdout, stderr=stderr, return_code=NO_STATUS, error="timeout")
    status = done.exit_code if done.exit_code >= 0 else 128 - done.exit_code
    return Outcome(stdout=stdout, stderr=with_notes(stderr, notices), return_code=status)


def failed(kind: str, why: str) -> Outcome:
    """Where there is no exit status: see `Outcome.error`."""
    return Outcome(stdout="", stderr=why, return_code=NO_STATUS, error=kind)


def with_notes(text: str, notes: list[str]) -> str:
    """`text` with notes below it, each a line of its own; as it is where there are none."""
    if not notes:
        return text
    separator = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{separator}{'\n'.join(notes)}"
