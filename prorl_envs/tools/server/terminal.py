"""Shell on a pseudo-terminal, and the descriptors that control it.

The shell is interactive, so that an interrupt stops the command and not the shell. The terminal carries typed
lines (`shell_syntax.py`) and the commands' input and output. The shell reports the end of a command, its
status and its directory over a pipe.
"""

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import sys
import termios
from dataclasses import dataclass
from typing import Self

from ptyprocess import PtyProcess  # type: ignore[import-untyped]

from prorl_envs.tools.protocol.output import OutputBuffer
from prorl_envs.tools.protocol.shell_status import Reports
from prorl_envs.tools.server.input_detection import (
    TIOCGPTN,
    ForegroundState,
    by_line,
    inspect_foreground,
    settings,
)
from prorl_envs.tools.server.loop import EventLoop
from prorl_envs.tools.server.session import SessionProcess
from prorl_envs.tools.server.shell_syntax import BASH, SH, ShellSyntax

#: From <asm-generic/ioctls.h>: signal the foreground process group of a pty, regardless of its `stty isig`.
_TIOCSIG = 0x40045436
ROWS, COLUMNS = 50, 160
_READ_SIZE = 8192
#: Temporary numbers for a shell's descriptors, which this process does not use otherwise.
_TEXT_FD, _REPORT_FD = 990, 991


@dataclass(slots=True)
class Command:
    """Command whose end the shell has not reported.

    Args:
        nonce: prefix of the report.
        asked: number of requests for a missing report.
        seen: bytes of output at the last check whether the command waits; None before the first.
        input: remaining input to type.
        untyped: True if none of the input has been typed yet.
    """

    nonce: str
    asked: int = 0
    seen: int | None = None
    input: str = ""
    untyped: bool = True


class Terminal(SessionProcess):
    """Running shell, bash or else `sh`.

    Args:
        dialect: syntax of the shell.
        pid: process id of the shell, a child of this process.
        master: the terminal's master side. This object closes this and the following descriptors.
        report: read end of the pipe on which the shell reports.
        text: memory file from which the shell reads commands that cannot be typed.
        loop: the server's loop.
        buffer: receives the commands' output.
    """

    def __init__(
        self,
        dialect: ShellSyntax,
        pid: int,
        master: int,
        report: int,
        text: int,
        loop: EventLoop,
        buffer: OutputBuffer,
    ) -> None:
        super().__init__(pid, master, (report, text), loop=loop, buffer=buffer)
        self.dialect = dialect
        self._process = PtyProcess(pid, master)
        self.fd: int = self._process.fd
        self.report, self._text = report, text
        self._settings = settings(master)
        self._unread = False
        self._reports = Reports()
        #: True once no report can arrive any more.
        self.report_closed = False
        #: Exit status of the last command.
        self.status = 0
        self.command: Command | None = None

    @classmethod
    def open(cls, cwd: str, loop: EventLoop, buffer: OutputBuffer) -> Self:
        """Start a shell with this process's environment.

        Args:
            cwd: directory; if it cannot be entered, the shell starts in the server's own directory.
            loop, buffer: see the class.

        Raises:
            OSError: there is no shell, or no pseudo-terminal.
        """
        path, dialect = _find_shell()
        text = os.memfd_create("command", os.MFD_CLOEXEC)
        report, report_write = os.pipe()
        try:
            pid, master = _spawn(path, dialect, cwd, text, report_write)
        except BaseException:
            os.close(text)
            os.close(report)
            raise
        finally:
            os.close(report_write)
        os.set_blocking(report, False)
        terminal = cls(dialect, pid, master, report, text, loop, buffer)
        terminal._type(dialect.prepare.encode())
        return terminal

    def evaluate(self, text: str) -> None:
        """Make the shell evaluate `text`, with `$?` as before, and report."""
        self._restore_settings()
        self.command = Command(os.urandom(8).hex())
        line, content = self.dialect.line(text, nonce=self.command.nonce, status=self.status)
        if content is not None:  # a memory file, from which the shell reads the text
            os.ftruncate(self._text, 0)
            os.pwrite(self._text, content, 0)
            os.lseek(self._text, 0, os.SEEK_SET)
        self._type(line)

    def read_report(self) -> str | None:
        """Read what the shell has reported. Return its directory if the command has ended; then `status` is
        the command's, and `command` is None."""
        try:
            data = os.read(self.report, _READ_SIZE)
        except BlockingIOError:
            return None
        if not data:  # the shell closed the pipe or exited; its exit, a check or the deadline follows
            self.loop.forget(self.report)
            self.report_closed = True
            return None
        report = self._reports.feed(data, self.command.nonce if self.command is not None else "")
        if report is None or self.command is None:
            return None
        self.command = None
        self.status, directory = report
        return directory

    def ask_report(self, *, repair: bool = False) -> None:
        """Make the shell report once it reads its terminal again; with `repair`, type the repair first."""
        assert self.command is not None
        nonce = self.command.nonce
        self._restore_settings()
        self._type(self.dialect.ask_repaired(nonce) if repair else self.dialect.ask(nonce))

    def answer(self, keys: bytes) -> None:
        """Type into the foreground program."""
        self._unread = True
        self._type(keys)

    def inspect_foreground(self) -> ForegroundState:
        """Return the state of the foreground."""
        return inspect_foreground(self.fd, report_fd=self.dialect.report_fd, shell=self.pid)

    @property
    def is_mute(self) -> bool:
        """True if the shell waits for a line, or for a builtin's input, and can never report again: its limit
        of open files is below the number of its report descriptor."""
        soft, _ = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
        return self.dialect.report_fd >= soft != resource.RLIM_INFINITY and self.at_prompt

    @property
    def by_line(self) -> bool:
        """True if the foreground program gets whole lines, not single keys."""
        return by_line(self.fd)

    def _restore_settings(self) -> None:
        # The last command may have changed the terminal. Reading the settings is four times faster than
        # writing.
        if self._unread:
            self._unread = False
            # Discards typed but unread input.
            fcntl.ioctl(self.fd, termios.TCSETSF, self._settings)
        elif settings(self.fd) != self._settings:
            fcntl.ioctl(self.fd, termios.TCSETS, self._settings)

    def interrupt(self) -> None:
        """Interrupt like Ctrl-C, even if the terminal's settings disable it."""
        fcntl.ioctl(self.fd, _TIOCSIG, signal.SIGINT)

    @property
    def at_prompt(self) -> bool:
        """True if the shell itself is in the foreground."""
        return _foreground(self.fd) == self.pid

    def resume(self) -> None:
        """Continue a stopped shell."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)

    def kill_foreground(self) -> None:
        """Kill the running command's process group; the shell itself survives unless it is in the group."""
        group = _foreground(self.fd)
        if group > 0 and _is_in_session(group, self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the shell and its foreground."""
        self.kill_foreground()
        with contextlib.suppress(ProcessLookupError):  # already reaped by another process
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def discard(self) -> int:
        status = super().discard()
        # `PtyProcess.close` sleeps, and signals a process that has exited.
        self._process.fileobj.close()
        self._process.closed = True
        return status

    def _type(self, line: bytes) -> None:
        # A full input queue means that the program does not read; the deadline handles that.
        with contextlib.suppress(BlockingIOError):
            os.write(self.fd, line)


def _find_shell() -> tuple[str, ShellSyntax]:
    for dialect in (BASH, SH):
        path = shutil.which(dialect.name)
        if path is not None:
            return path, dialect
    raise FileNotFoundError(2, "no bash and no sh in the sandbox's PATH")


def _spawn(path: str, dialect: ShellSyntax, cwd: str, text: int, report: int) -> tuple[int, int]:
    master, slave = os.openpty()
    try:
        set_up(slave)
        number = fcntl.ioctl(master, TIOCGPTN, bytes(4))
        pid = _spawn_on(f"/dev/pts/{int.from_bytes(number, sys.byteorder)}", path, dialect, cwd, text, report)
    except BaseException:
        os.close(master)
        raise
    finally:
        os.close(slave)
    return pid, master


def set_up(terminal: int) -> None:
    """Apply a shell's settings to a new terminal."""
    # Must precede the shell's start. After killing a command, the shell restores the settings of its start.
    settings = termios.tcgetattr(terminal)
    settings[1] &= ~termios.OPOST  # "\n" stays "\n"
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, settings)
    termios.tcsetwinsize(terminal, (ROWS, COLUMNS))


def _spawn_on(terminal: str, path: str, dialect: ShellSyntax, cwd: str, text: int, report: int) -> int:
    """Start the shell as leader of a new session with this controlling terminal; return its pid.

    `PtyProcess.spawn` forks this process, so that a shell would start in 3.0 ms instead of 1.9
    (docs/decisions/tool-server.md). The first terminal that a session's leader opens becomes the controlling
    terminal.
    """
    to_null = ((os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2))
    to_terminal = ((os.POSIX_SPAWN_DUP2, 0, fd) for fd in (1, 2))
    os.dup2(text, _TEXT_FD, inheritable=False)
    os.dup2(report, _REPORT_FD, inheritable=False)
    home = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # The sandbox can remove or lock the directory at any time.
        with contextlib.suppress(OSError):
            os.chdir(cwd)
        return os.posix_spawn(
            path,
            [path, *dialect.options],
            {**os.environ, "PS1": "", "PS2": ""},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, terminal, os.O_RDWR, 0),
                *(to_null if dialect.quiet else to_terminal),
                (os.POSIX_SPAWN_DUP2, _TEXT_FD, dialect.text_fd),
                (os.POSIX_SPAWN_DUP2, _REPORT_FD, dialect.report_fd),
            ],
            setsid=True,
            # Python ignores these signals, and programs would inherit this: `yes | head` would fail.
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
        )
    finally:
        os.fchdir(home)
        for fd in (home, _TEXT_FD, _REPORT_FD):
            os.close(fd)


def _is_in_session(group: int, shell: int) -> bool:
    # All processes of a terminal's foreground group may have exited. The number may have been reused since,
    # even by a process outside the sandbox.
    try:
        return os.getsid(group) == shell
    except ProcessLookupError:  # only the leader has exited; its number stays reserved while the group lives
        return True


def _foreground(terminal: int) -> int:
    try:
        return os.tcgetpgrp(terminal)
    except OSError:
        return -1  # no process has the terminal any more
