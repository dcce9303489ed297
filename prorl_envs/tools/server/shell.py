"""Persistent shell sessions.

idle -> running -> idle                       the report arrived
        running -> waiting                    the command waits for input: the call is answered
                   waiting -> running         the next call types into the command
                   waiting -> idle            the command exited by itself; the next call reports this
        running -> interrupted -> idle        the command released the terminal, and the report arrived
                   interrupted -> killed      there was no report, so the process group was killed
                                  killed -> dead   there was still no report, so the shell was killed
        any -> dead -> running                the shell exited; the next command starts another shell
"""

import os
from collections.abc import Callable, Mapping

from prorl_envs.sandbox.linux.descriptors import has_exited
from prorl_envs.tools.protocol.messages import Bash, BashDone, Reply
from prorl_envs.tools.protocol.shell_status import Reports
from prorl_envs.tools.server.input_detection import ForegroundState
from prorl_envs.tools.server.keys import names_key, next_piece, to_type
from prorl_envs.tools.server.loop import EventLoop, Timer
from prorl_envs.tools.server.reader import OutputReader
from prorl_envs.tools.server.session import Cause, RequestSession, Running
from prorl_envs.tools.server.shell_syntax import SH
from prorl_envs.tools.server.terminal import Terminal

#: Seconds between checks whether an interrupted command has released the terminal, for which no event exists.
_INTERRUPTED_CHECK_S = 0.01
#: Seconds before a check whether a command waits for input: the first check, the longest delay, after typing.
_FIRST_CHECK_S, _MAX_CHECK_S, _TYPED_CHECK_S = 0.05, 1.0, 0.005
_READ_SIZE = 8192
#: Maximum requests for a missing report; the last request includes a repair.
_REPAIRS = 2

_WAITS = "[the command waits for input: call again with is_input to type into it, C-c interrupts it]"
_BUSY = (
    "[not run: the command before still waits for input in this session. Type into it with is_input, "
    "interrupt it with C-c, use another session, or restart this one]"
)
_NOTHING_WAITS = "[nothing was typed: no command waits for input in this session]"
_NOT_ALL_READ = "[the command did not read all of the input]"
_NO_BASH = "[this system has no bash: the shell is sh]"
_NEW = "[this is a new shell]"


class ShellSession(RequestSession[Bash]):
    """Shell session.

    Args:
        loop: the server's loop.
        workdir: directory of the first shell; later shells start in the last known directory.
        env: the shell's whole environment.
        output_limit: bytes of output kept of each command.
        grace_s: seconds between the interrupt, the kill of the command, and the kill of the shell.
    """

    def __init__(
        self, loop: EventLoop, *, workdir: str, env: Mapping[str, str], output_limit: int, grace_s: float
    ) -> None:
        super().__init__(loop, output_limit=output_limit, grace_s=grace_s)
        self._cwd = self._workdir = workdir
        self._env = env
        self._terminal: Terminal | None = None
        self._reader: OutputReader | None = None
        self._reports = Reports()
        self._nonce = ""
        self._status = 0
        self._notices: list[str] = []
        self._said_no_bash = False
        self._waits = False
        #: Exit status of a command that waited and then exited by itself.
        self._ended: int | None = None
        #: Remaining input to type, and whether none of it has been typed yet.
        self._input, self._untyped = "", True
        #: Bytes of output at the last check.
        self._seen: int | None = None
        self._timer: Timer | None = None
        #: Number of requests for the command's report, and whether no report can arrive any more.
        self._asked = 0
        self._report_closed = False

    def close(self) -> None:
        """Kill the shell and its command. Background jobs continue without a terminal."""
        if self._terminal is not None:
            self._terminal.kill()
            self._discard()

    def _check_exit(self) -> None:
        if self._terminal is not None and has_exited(self._terminal.pidfd):
            self._on_exit()

    def finish(self, make_reply: Callable[[Running[Bash]], Reply]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().finish(make_reply)

    def _begin(self, request: Bash) -> Reply | None:
        if request.restart:
            self._restart()
        elif request.is_input or (self._waits and names_key(request.command)):
            return self._continue(request)
        elif self._waits:
            return self._refuse(request, _BUSY)
        terminal = self._terminal or self._open()
        self._begin_ended()
        self._nonce = os.urandom(8).hex()
        self._asked = 0
        terminal.evaluate(request.command, nonce=self._nonce, status=self._status)
        self._seen = None
        self._watch(_FIRST_CHECK_S)
        return None

    def _continue(self, request: Bash) -> Reply | None:
        """Continue the waiting command."""
        if self._ended is not None:
            status, self._ended = self._ended, None
            return self._answer(request, status, _NOT_ALL_READ if request.command else "")
        if not self._waits:
            return self._refuse(request, _NOTHING_WAITS)
        try:
            self._input = to_type(request.command)
        except ValueError as error:
            return self._refuse(request, f"[nothing was typed: {error}]")
        self._waits, self._untyped = False, True
        self._seen = self.output.size
        self._watch(0.0)
        return None

    def _begin_ended(self) -> None:
        if self._ended is not None:
            self._notices.append(
                f"[before this command, the one that waited ended with exit status {self._ended}]"
            )
            self._ended = None

    def _restart(self) -> None:
        self.close()
        self.output.take()
        self._cwd = self._workdir
        self._waits, self._ended, self._input = False, None, ""
        self._notices = [_NEW]

    def _open(self) -> Terminal:
        if not os.path.isdir(self._cwd):  # noqa: PTH112 - this process does not import pathlib
            self._cwd = self._workdir
        terminal = self._terminal = Terminal.open(self._cwd, self._env)
        self._reader = OutputReader(self.loop, terminal.fd, self.output)
        self._reports = Reports()
        self._status = 0
        self._report_closed = False
        if terminal.dialect is SH and not self._said_no_bash:
            self._said_no_bash = True
            self._notices.append(_NO_BASH)
        self.loop.watch(terminal.report, self._on_report)
        self.loop.watch(terminal.pidfd, self._on_exit)
        return terminal

    def _discard(self) -> int:
        """Close the exited shell; return its exit status."""
        terminal, self._terminal = self._terminal, None
        assert terminal is not None
        for fd in (terminal.fd, terminal.report, terminal.pidfd):
            self.loop.forget(fd)
        status = terminal.reap()
        terminal.close()
        return status

    def _on_report(self) -> None:
        assert self._terminal is not None and self._reader is not None
        try:
            data = os.read(self._terminal.report, _READ_SIZE)
        except BlockingIOError:
            return
        if not data:  # the shell closed the pipe or exited; its exit, a check or the deadline follows
            self.loop.forget(self._terminal.report)
            self._report_closed = True
            return
        report = self._reports.feed(data, self._nonce)
        if report is None or not (self.running is not None or self._waits):
            return
        self._status, self._cwd = report
        self._reader.drain()
        if self.running is not None:
            self.finish(lambda running: self._reply(running, self._status))
        else:
            self._waits, self._ended = False, self._status

    def _on_exit(self) -> None:
        assert self._reader is not None
        self._reader.drain()
        status = self._discard()
        self._waits = False
        ended = f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"
        if self._asked > _REPAIRS:
            ended = (
                "could not report any more (was it replaced by `exec`, `ulimit -n` lowered, or a DEBUG trap "
                "set with `extdebug`?) and was ended"
            )
        notice = f"the shell {ended}; the next command gets a new one, without its variables and functions"
        if self.running is None:
            notice = notice.replace("the next command gets", "this is")
            self._notices.append(f"[before this command, {notice}]")
        else:
            self.finish(lambda running: self._reply(running, status if status >= 0 else None, f"[{notice}]"))

    def _reply(self, running: Running[Bash], status: int | None, notice: str = "") -> BashDone:
        stopped = f"[{running.stopped}]" if running.cause else ""
        unread = _NOT_ALL_READ if self._input.strip("\n") else ""
        self._input = ""
        notice = "\n".join(filter(None, [stopped, unread, notice]))
        done = self._answer(running.request, None if running.cause else status, notice)
        done.timed_out = running.cause is Cause.TIMEOUT
        return done

    def _answer(self, request: Bash, status: int | None, notice: str) -> BashDone:
        captured = self.output.take()
        notices, self._notices = [*self._notices, notice], []
        text = "\n".join(filter(None, notices))
        return BashDone(request.id, captured.text(), captured.omitted, status, self._cwd, False, text)

    def _refuse(self, request: Bash, notice: str) -> BashDone:
        return BashDone(request.id, "", 0, None, self._cwd, False, notice, self._waits, True)

    # Checks whether a running command waits for input.

    def _watch(self, delay_s: float) -> None:
        self._timer = self.loop.call_later(delay_s, lambda: self._observe(delay_s))

    def _observe(self, waited_s: float) -> None:
        running, terminal, reader = self.running, self._terminal, self._reader
        if running is None or running.cause is not None or terminal is None or reader is None:
            return
        reader.drain()
        quiet = self._seen in (None, self.output.size)
        self._seen = self.output.size
        if not quiet:
            self._watch(_TYPED_CHECK_S if waited_s <= _TYPED_CHECK_S else _FIRST_CHECK_S)
            return
        match terminal.inspect_foreground():
            case ForegroundState.BUSY:
                self._watch(min(max(2 * waited_s, _TYPED_CHECK_S), _MAX_CHECK_S))
            case ForegroundState.STOPPED:  # no other process would continue it
                terminal.resume()
                self._watch(_FIRST_CHECK_S)
            case ForegroundState.WAITING if not self._report_closed and not terminal.is_mute:
                self._feed(terminal)
            case _:
                self._recover(terminal)

    def _feed(self, terminal: Terminal) -> None:
        """Type the next piece of input into the waiting command, or answer the call."""
        if self._input:
            piece, self._input = next_piece(self._input, by_line=terminal.by_line, first=self._untyped)
            self._untyped = False
            terminal.answer(piece)
            self._watch(_TYPED_CHECK_S)
            return
        assert self._reader is not None
        self._reader.drain()  # output written between the previous read and the check
        self._waits = True
        self.finish(self._reply_waiting)

    def _reply_waiting(self, running: Running[Bash]) -> BashDone:
        done = self._answer(running.request, None, _WAITS)
        done.waiting = True
        return done

    def _recover(self, terminal: Terminal) -> None:
        """Request the missing report of a shell that reads its next line.

        Either an interrupt discarded the rest of the shell's line, or the command made the shell misread it.
        """
        running = self.running
        self._on_report()
        if self.running is not running:
            return
        self._asked = _REPAIRS + 1 if self._report_closed else self._asked + 1
        if self._asked > _REPAIRS:
            terminal.kill()
            return
        terminal.ask_report(nonce=self._nonce, repair=self._asked == _REPAIRS)
        self._watch(_TYPED_CHECK_S)

    # Steps after an interrupt.

    def _interrupt(self, running: Running[Bash]) -> None:
        assert self._terminal is not None
        self._terminal.interrupt()
        self._check_later(running, self.grace_s, asked=False)

    def _check_later(self, running: Running[Bash], remaining_s: float, *, asked: bool) -> None:
        # Without the delay, a builtin that waits for input could read the next typed line.
        delay_s = _INTERRUPTED_CHECK_S
        self.loop.call_later(
            delay_s, lambda: self._check_interrupted(running, remaining_s - delay_s, asked=asked)
        )

    def _check_interrupted(self, running: Running[Bash], remaining_s: float, *, asked: bool) -> None:
        """Request the report once the shell has its terminal back. When time is up, take the next step."""
        terminal = self._terminal
        if self.running is not running or terminal is None:
            return
        if remaining_s <= 0 and running.killed:
            terminal.kill()
            return
        if remaining_s <= 0:
            running.killed, asked, remaining_s = True, False, self.grace_s
            if terminal.at_prompt:
                terminal.interrupt()
            else:
                terminal.kill_foreground()
        elif terminal.at_prompt and not asked:
            terminal.ask_report(nonce=self._nonce)
            asked = True
        self._check_later(running, remaining_s, asked=asked)
