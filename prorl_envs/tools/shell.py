"""Persistent shell sessions: one command at a time, each with a deadline that ends it.

    idle -> running -> idle                       the report arrived
            running -> stopping -> idle           interrupted, then the report arrived
                       stopping -> dead           neither the interrupt nor the kill of its foreground helped
            any -> dead -> (new shell) running    the shell ended; the next command starts another
"""

import os
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prorl_envs.tools.loop import Loop, Timer
from prorl_envs.tools.output import OutputBuffer
from prorl_envs.tools.terminal import Terminal
from prorl_envs.tools.wire import Bash, BashDone, Refused

#: Commands that may wait for the one that runs in their session.
QUEUE_LIMIT = 64
#: Seconds between looks at whether an interrupted command has given up the terminal: no event tells.
_LOOK_S = 0.01
_READ_SIZE = 65536
# A terminal holds 64 KiB that nobody has read, and what was written before the report arrived lies there.
_DRAIN_READS = 64

type Answer = Callable[[BashDone | Refused], None]


class Reports:
    """Reads `nonce status directory NUL` from the pipe on which a shell reports. Pure.

    A command that finds the pipe can write to it too; without the nonce of the moment that is ignored.
    """

    #: Bytes of the longest report: the longest path there is, with room for the rest.
    LIMIT = 4096 + 64

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes, nonce: str) -> tuple[int, str] | None:
        """Take what arrived; return status and directory once the report with `nonce` is complete."""
        *reports, rest = (self._buffer + data).split(b"\0")
        self._buffer = rest[-self.LIMIT :]
        prefix = nonce.encode() + b" "
        for report in reports:
            if len(report) <= self.LIMIT and (start := report.rfind(prefix)) >= 0:
                status, _, directory = report[start + len(prefix) :].partition(b" ")
                if status.isdigit() and len(status) <= 3:
                    return int(status), directory.decode("utf-8", "replace")
        return None


@dataclass(slots=True)
class _Running:
    request: Bash
    answer: Answer
    nonce: str
    deadline: Timer | None = None
    cause: str = ""  # why it is being stopped: "timeout", "cancelled", or not at all
    asked: bool = False
    killed: bool = False


class ShellSession:
    """One session: its shell, the command that runs in it, and those that wait.

    Args:
        loop: the server's loop.
        workdir: where the first shell starts; later ones start in the last directory known.
        env: the shell's whole environment.
        output_limit: bytes of output kept of each command.
        grace_s: seconds between the interrupt, the kill of the foreground, and the kill of the shell.
    """

    def __init__(
        self, loop: Loop, *, workdir: str, env: Mapping[str, str], output_limit: int, grace_s: float
    ) -> None:
        self._loop = loop
        self._cwd = self._workdir = workdir
        self._env = env
        self._grace_s = grace_s
        self._output = OutputBuffer(output_limit)
        self._reports = Reports()
        self._terminal: Terminal | None = None
        self._status = 0
        self._notice = ""
        self._running: _Running | None = None
        self._waiting: deque[tuple[Bash, Answer]] = deque()

    def submit(self, request: Bash, answer: Answer) -> None:
        """Run a command once those before it have ended."""
        if len(self._waiting) >= QUEUE_LIMIT:
            answer(Refused(request.id, 11, f"{QUEUE_LIMIT} commands already wait in this session"))
            return
        self._waiting.append((request, answer))
        if self._running is None:
            self._next()

    def cancel(self, request_id: int) -> None:
        """Stop the command of that request, if it is this session's."""
        if self._running is not None and self._running.request.id == request_id:
            self._stop("cancelled")
            return
        for waiting in self._waiting:
            if waiting[0].id == request_id:
                self._waiting.remove(waiting)
                waiting[1](BashDone(request_id, "", 0, None, self._cwd, False, "[cancelled before it ran]"))
                return

    def close(self) -> None:
        """End the shell and its foreground; background jobs are told that their terminal is gone."""
        if self._terminal is not None:
            self._terminal.hang_up()
            self._terminal.kill()
            self._discard_terminal()

    def _next(self) -> None:
        while self._waiting and self._running is None:
            request, answer = self._waiting.popleft()
            try:
                self._start(request, answer)
            except OSError as error:
                self._running = None
                answer(Refused(request.id, error.errno or 0, str(error)))

    def _start(self, request: Bash, answer: Answer) -> None:
        terminal = self._terminal or self._open_terminal()
        nonce = secrets.token_hex(8)
        running = self._running = _Running(request, answer, nonce)
        terminal.evaluate(request.command.encode("utf-8", "replace"), nonce=nonce, status=self._status)
        running.deadline = self._loop.call_later(request.timeout_s, lambda: self._stop("timeout"))

    def _open_terminal(self) -> Terminal:
        if not os.path.isdir(self._cwd):  # noqa: PTH112 - in a small process: pathlib is not needed
            self._cwd = self._workdir
        terminal = self._terminal = Terminal(self._cwd, self._env)
        self._status = 0
        self._loop.watch(terminal.fd, self._on_output)
        self._loop.watch(terminal.report, self._on_report)
        self._loop.watch(terminal.pidfd, self._on_exit)
        return terminal

    def _on_output(self) -> None:
        assert self._terminal is not None
        if not self._read_output():
            self._loop.unwatch(self._terminal.fd)

    def _read_output(self) -> bool:
        """Read once; False where nobody has the terminal open any more."""
        assert self._terminal is not None
        try:
            self._output.feed(os.read(self._terminal.fd, _READ_SIZE))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _on_report(self) -> None:
        assert self._terminal is not None
        data = os.read(self._terminal.report, _READ_SIZE)
        if not data:  # the shell closed it or is gone: its exit, or the deadline, decides
            self._loop.unwatch(self._terminal.report)
            return
        if self._running is None:
            return
        report = self._reports.feed(data, self._running.nonce)
        if report is not None:
            self._status, self._cwd = report
            self._drain()
            self._finish(self._status)

    def _drain(self) -> None:
        """Read all that was written before now.

        Reading until nothing is left is enough: a read that would block first has the kernel deliver what is
        still on its way through the terminal.
        """
        assert self._terminal is not None
        for _ in range(_DRAIN_READS):
            try:
                self._output.feed(os.read(self._terminal.fd, _READ_SIZE))
            except OSError:
                return

    def _on_exit(self) -> None:
        self._drain()
        status = self._discard_terminal()
        ended = f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"
        notice = f"[the shell {ended}; the next command gets a new one, without its variables and functions]"
        if self._running is None:
            self._notice = notice
        else:
            self._finish(status if status >= 0 and not self._running.cause else None, notice)

    def _discard_terminal(self) -> int:
        terminal, self._terminal = self._terminal, None
        assert terminal is not None
        for fd in (terminal.fd, terminal.report, terminal.pidfd):
            self._loop.forget(fd)
        status = terminal.reap()
        terminal.close()
        self._reports = Reports()
        return status

    def _stop(self, cause: str) -> None:
        """Interrupt the command; the looks that follow end it whatever it does."""
        running = self._running
        assert running is not None and self._terminal is not None
        if running.cause:
            return
        running.cause = cause
        if running.deadline is not None:
            running.deadline.cancel()
        self._terminal.interrupt()
        self._look(running, self._grace_s)

    def _look(self, running: _Running, left_s: float) -> None:
        terminal = self._terminal
        if self._running is not running or terminal is None:
            return
        if terminal.at_prompt and not running.asked:
            running.asked = True
            terminal.ask_report(nonce=running.nonce)
        elif left_s <= 0 and running.killed:
            terminal.kill()
            return
        elif left_s <= 0:
            running.killed, running.asked = True, False
            if not terminal.at_prompt:
                terminal.kill_foreground()
            left_s = self._grace_s
        self._loop.call_later(_LOOK_S, lambda: self._look(running, left_s - _LOOK_S))

    def _finish(self, exit_code: int | None, notice: str = "") -> None:
        running, self._running = self._running, None
        assert running is not None
        if running.deadline is not None:
            running.deadline.cancel()
        captured = self._output.take()
        notices = [self._notice, _stopped(running, shell_lost=bool(notice)), notice]
        self._notice = ""
        running.answer(
            BashDone(
                running.request.id,
                captured.text(),
                captured.omitted,
                None if running.cause else exit_code,
                self._cwd,
                running.cause == "timeout",
                "\n".join(filter(None, notices)),
            )
        )
        self._next()


def _stopped(running: _Running, *, shell_lost: bool) -> str:
    if not running.cause:
        return ""
    why = "[cancelled" if running.cause == "cancelled" else f"[timed out after {running.request.timeout_s:g} s"
    how = "it ignored the interrupt and was killed" if running.killed else "it was interrupted"
    if shell_lost:
        return f"{why}: {how}, and the shell with it]"
    return f"{why}: {how} (it may have been waiting for input); the shell is as it left it]"
