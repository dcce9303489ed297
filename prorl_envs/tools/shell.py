"""Persistent shell sessions.

idle -> running -> idle                       the report arrived
        running -> interrupted -> idle        the command gave up the terminal, and the report arrived
                   interrupted -> killed      it did not, so its process group was killed
                                  killed -> dead   that did not help either, so the shell was killed
        any -> dead -> running                the shell ended; the next command starts another
"""

import os
import secrets
from collections.abc import Mapping

from prorl_envs.tools.loop import Loop, has_ended
from prorl_envs.tools.reader import OutputReader
from prorl_envs.tools.session import Cause, Running, Session
from prorl_envs.tools.terminal import Terminal
from prorl_envs.tools.wire import Bash, BashDone

#: Seconds between looks at whether an interrupted command has given up the terminal: no event tells.
_LOOK_S = 0.01
_READ_SIZE = 8192


class Reports:
    """Reads `nonce status directory NUL` from the pipe on which a shell reports. Pure.

    A command that finds the pipe can write to it too; without the nonce of the moment that is ignored.
    """

    #: Bytes of the longest report: the longest path there is, with room for the rest.
    LIMIT = 4096 + 64

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes, nonce: str) -> tuple[int, str] | None:
        """Take what arrived; return status and directory once the report with `nonce` is complete."""
        *reports, rest = (self._rest + data).split(b"\0")
        self._rest = rest[-self.LIMIT :]
        prefix = nonce.encode() + b" "
        for report in reports:
            # Garbage without a NUL may stand before it.
            start = report.rfind(prefix)
            if start >= 0:
                status, _, directory = report[start + len(prefix) :].partition(b" ")
                if status.isdigit() and len(status) <= 3:
                    return int(status), directory[: self.LIMIT].decode("utf-8", "replace")
        return None


class ShellSession(Session[Bash]):
    """One shell session.

    Args:
        loop: the server's loop.
        workdir: where the first shell starts; later ones start in the last directory known.
        env: the shell's whole environment.
        output_limit: bytes of output kept of each command.
        grace_s: seconds between the interrupt, the kill of the command, and the kill of the shell.
    """

    def __init__(
        self, loop: Loop, *, workdir: str, env: Mapping[str, str], output_limit: int, grace_s: float
    ) -> None:
        super().__init__(loop, output_limit=output_limit, grace_s=grace_s)
        self._cwd = self._workdir = workdir
        self._env = env
        self._terminal: Terminal | None = None
        self._reader: OutputReader | None = None
        self._reports = Reports()
        self._nonce = ""
        self._status = 0
        self._notice = ""

    def close(self) -> None:
        """End the shell and its command. Background jobs stay, without a terminal, until the sandbox ends."""
        if self._terminal is not None:
            self._terminal.kill()
            self._discard()

    def _settle(self) -> None:
        if self._terminal is not None and has_ended(self._terminal.pidfd):
            self._on_exit()

    def _begin(self, request: Bash) -> None:
        terminal = self._terminal or self._open()
        self._nonce = secrets.token_hex(8)
        terminal.evaluate(request.command, nonce=self._nonce, status=self._status)

    def _open(self) -> Terminal:
        if not os.path.isdir(self._cwd):  # noqa: PTH112 - pathlib would be this process's only use of it
            self._cwd = self._workdir
        terminal = self._terminal = Terminal(self._cwd, self._env)
        self._reader = OutputReader(self.loop, terminal.fd, self.output)
        self._reports = Reports()
        self._status = 0
        self.loop.watch(terminal.report, self._on_report)
        self.loop.watch(terminal.pidfd, self._on_exit)
        return terminal

    def _discard(self) -> int:
        """Forget the ended shell; return its exit status."""
        terminal, self._terminal = self._terminal, None
        assert terminal is not None
        for fd in (terminal.fd, terminal.report, terminal.pidfd):
            self.loop.forget(fd)
        status = terminal.reap()
        terminal.close()
        return status

    def _on_report(self) -> None:
        assert self._terminal is not None and self._reader is not None
        data = os.read(self._terminal.report, _READ_SIZE)
        if not data:  # the shell closed it or is gone: its exit, or the deadline, decides
            self.loop.forget(self._terminal.report)
            return
        report = self._reports.feed(data, self._nonce)
        if report is not None and self.running is not None:
            self._status, self._cwd = report
            self._reader.drain()
            self.finish(lambda running: self._reply(running, self._status))

    def _on_exit(self) -> None:
        assert self._reader is not None
        self._reader.drain()
        status = self._discard()
        ended = f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"
        notice = f"the shell {ended}; the next command gets a new one, without its variables and functions"
        if self.running is None:
            self._notice = f"[before this command, {notice.replace('the next command gets', 'this is')}]"
        else:
            self.finish(lambda running: self._reply(running, status if status >= 0 else None, f"[{notice}]"))

    def _reply(self, running: Running[Bash], status: int | None, notice: str = "") -> BashDone:
        captured = self.output.take()
        stopped = (
            f"[{running.stopped}; nobody can answer a command that asks for input]" if running.cause else ""
        )
        notices = [self._notice, stopped if running.cause else "", notice]
        self._notice = ""
        return BashDone(
            running.request.id,
            captured.text(),
            captured.omitted,
            None if running.cause else status,
            self._cwd,
            running.cause is Cause.TIMEOUT,
            "\n".join(filter(None, notices)),
        )

    def _interrupt(self, running: Running[Bash]) -> None:
        assert self._terminal is not None
        self._terminal.interrupt()
        self._look_again(running, self.grace_s, asked=False)

    def _look_again(self, running: Running[Bash], left_s: float, *, asked: bool) -> None:
        # Not at once, even at first: a builtin that waits for input must not read what is typed next.
        self.loop.call_later(_LOOK_S, lambda: self._look(running, left_s - _LOOK_S, asked=asked))

    def _look(self, running: Running[Bash], left_s: float, *, asked: bool) -> None:
        """Once the shell has its terminal back, ask for the report; take the next step when time is up."""
        terminal = self._terminal
        if self.running is not running or terminal is None:
            return
        if left_s <= 0 and running.killed:
            terminal.kill()
            return
        if left_s <= 0:
            running.killed, asked, left_s = True, False, self.grace_s
            if terminal.at_prompt:
                terminal.interrupt()
            else:
                terminal.kill_foreground()
        elif terminal.at_prompt and not asked:
            terminal.ask_report(nonce=self._nonce)
            asked = True
        self._look_again(running, left_s, asked=asked)
