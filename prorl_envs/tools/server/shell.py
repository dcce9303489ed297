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

from prorl_envs.tools.protocol.messages import Bash, BashDone, Reply, Setup
from prorl_envs.tools.server.input_detection import ForegroundState
from prorl_envs.tools.server.keys import names_key, next_piece, to_type
from prorl_envs.tools.server.loop import EventLoop, Timer
from prorl_envs.tools.server.session import Cause, RequestSession, Running
from prorl_envs.tools.server.shell_syntax import SH
from prorl_envs.tools.server.terminal import Command, Terminal

#: Seconds between checks whether an interrupted command has released the terminal, for which no event exists.
_INTERRUPTED_CHECK_S = 0.01
#: Seconds before a check whether a command waits for input: the first check, the longest delay, after typing.
_FIRST_CHECK_S, _MAX_CHECK_S, _TYPED_CHECK_S = 0.05, 1.0, 0.005
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
_MUTE = (
    "could not report any more (was it replaced by `exec`, `ulimit -n` lowered, or a DEBUG trap set with "
    "`extdebug`?) and was ended"
)


class ShellSession(RequestSession[Bash, Terminal]):
    """Shell session. The first shell starts in the session's directory, later ones in the last known one."""

    kind, unit, state = "shell", "command", "its variables and functions"

    def __init__(self, loop: EventLoop, setup: Setup) -> None:
        super().__init__(loop, setup)
        self._cwd = setup.workdir
        self._said_no_bash = False
        #: Exit status of a command that waited and then exited by itself.
        self._ended: int | None = None
        #: Next check whether the command waits for input.
        self._check: Timer | None = None

    @property
    def _command(self) -> Command | None:
        """The running command, or one that waits for input without a request."""
        return self.process.command if self.process is not None else None

    def finish(self, reply: Reply) -> None:
        if self._check is not None:
            self._check.cancel()
        super().finish(reply)

    def _begin(self, request: Bash) -> Reply | None:
        if request.restart:
            self._restart()
        elif request.is_input or (self._command is not None and names_key(request.command)):
            return self._continue(request)
        elif self._command is not None:
            return self._refuse(request, _BUSY)
        terminal = self.process or self._open()
        if self._ended is not None:
            self.notices.append(
                f"[before this command, the one that waited ended with exit status {self._ended}]"
            )
            self._ended = None
        terminal.evaluate(request.command)
        self._watch(_FIRST_CHECK_S)
        return None

    def _continue(self, request: Bash) -> Reply | None:
        """Continue the waiting command."""
        if self._ended is not None:
            status, self._ended = self._ended, None
            return self._answer(request, status, _NOT_ALL_READ if request.command else "")
        command = self._command
        if command is None:
            return self._refuse(request, _NOTHING_WAITS)
        try:
            command.input = to_type(request.command)
        except ValueError as error:
            return self._refuse(request, f"[nothing was typed: {error}]")
        command.untyped = True
        command.seen = self.output.size
        self._watch(0.0)
        return None

    def _restart(self) -> None:
        self.close()
        self.output.take()
        self._cwd, self._ended = self.workdir, None
        self.notices = [_NEW]

    def _open(self) -> Terminal:
        if not os.path.isdir(self._cwd):  # noqa: PTH112 - this process does not import pathlib
            self._cwd = self.workdir
        terminal = self.process = Terminal.open(self._cwd, self.loop, self.output)
        if terminal.dialect is SH and not self._said_no_bash:
            self._said_no_bash = True
            self.notices.append(_NO_BASH)
        self.loop.watch(terminal.report, self._on_report)
        self.loop.watch(terminal.pidfd, self.on_exit)
        return terminal

    def _on_report(self) -> None:
        terminal, command = self.process, self._command
        assert terminal is not None
        directory = terminal.read_report()
        if directory is None or command is None:
            return
        self._cwd = directory
        terminal.reader.drain()
        if self.running is not None:
            self.finish(self._reply(self.running, command, terminal.status))
        else:
            self._ended = terminal.status

    def _exited(self, process: Terminal, running: Running[Bash], status: int, notice: str) -> BashDone:
        return self._reply(running, process.command, status if status >= 0 else None, notice)

    def _reply(
        self, running: Running[Bash], command: Command | None, status: int | None, notice: str = ""
    ) -> BashDone:
        unread = _NOT_ALL_READ if command is not None and command.input.strip("\n") else ""
        done = self._answer(
            running.request, None if running.cause else status, self.how_stopped(running), unread, notice
        )
        done.timed_out = running.cause is Cause.TIMEOUT
        return done

    def _answer(self, request: Bash, status: int | None, *notices: str) -> BashDone:
        captured = self.output.take()
        notice = self.take_notices(*notices)
        return BashDone(request.id, captured.text(), captured.omitted, status, self._cwd, False, notice)

    def _refuse(self, request: Bash, notice: str) -> BashDone:
        waits = self._command is not None
        return BashDone(request.id, "", 0, None, self._cwd, False, notice, waits, True)

    # Checks whether a running command waits for input.

    def _watch(self, delay_s: float) -> None:
        self._check = self.loop.call_later(delay_s, lambda: self._observe(delay_s))

    def _observe(self, waited_s: float) -> None:
        running, terminal, command = self.running, self.process, self._command
        if running is None or running.cause is not None or terminal is None or command is None:
            return
        terminal.reader.drain()
        quiet = command.seen in (None, self.output.size)
        command.seen = self.output.size
        if not quiet:
            self._watch(_TYPED_CHECK_S if waited_s <= _TYPED_CHECK_S else _FIRST_CHECK_S)
            return
        match terminal.inspect_foreground():
            case ForegroundState.BUSY:
                self._watch(min(max(2 * waited_s, _TYPED_CHECK_S), _MAX_CHECK_S))
            case ForegroundState.STOPPED:  # no other process would continue it
                terminal.resume()
                self._watch(_FIRST_CHECK_S)
            case ForegroundState.WAITING if not terminal.report_closed and not terminal.is_mute:
                self._feed(running, terminal, command)
            case _:
                self._recover(running, terminal, command)

    def _feed(self, running: Running[Bash], terminal: Terminal, command: Command) -> None:
        """Type the next piece of input into the waiting command, or answer the call."""
        if command.input:
            piece, command.input = next_piece(command.input, by_line=terminal.by_line, first=command.untyped)
            command.untyped = False
            terminal.answer(piece)
            self._watch(_TYPED_CHECK_S)
            return
        terminal.reader.drain()  # output written between the previous read and the check
        done = self._answer(running.request, None, _WAITS)
        done.waiting = True
        self.finish(done)

    def _recover(self, running: Running[Bash], terminal: Terminal, command: Command) -> None:
        """Request the missing report of a shell that reads its next line.

        Either an interrupt discarded the rest of the shell's line, or the command made the shell misread it.
        """
        self._on_report()
        if self.running is not running:
            return
        command.asked += 1
        if terminal.report_closed or command.asked > _REPAIRS:
            terminal.fault = _MUTE
            terminal.kill()
            return
        terminal.ask_report(repair=command.asked == _REPAIRS)
        self._watch(_TYPED_CHECK_S)

    # Steps after an interrupt.

    def _interrupt(self, running: Running[Bash]) -> None:
        assert self.process is not None
        self.process.interrupt()
        self._check_later(running, self.grace_s, asked=False)

    def _check_later(self, running: Running[Bash], remaining_s: float, *, asked: bool) -> None:
        # Without the delay, a builtin that waits for input could read the next typed line.
        delay_s = _INTERRUPTED_CHECK_S
        self.loop.call_later(
            delay_s, lambda: self._check_interrupted(running, remaining_s - delay_s, asked=asked)
        )

    def _check_interrupted(self, running: Running[Bash], remaining_s: float, *, asked: bool) -> None:
        """Request the report once the shell has its terminal back. When time is up, take the next step."""
        terminal = self.process
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
            terminal.ask_report()
            asked = True
        self._check_later(running, remaining_s, asked=asked)
