"""A shell on a pseudo-terminal, and the descriptors through which it is driven.

The shell is interactive, so that an interrupt ends the command and not the shell. Its terminal carries only
the commands' input and output. Lines are typed into it (`dialects.py`); the end of the command, its status
and its directory come back over a pipe.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import struct
import sys
import termios
from collections.abc import Mapping
from typing import Self

from ptyprocess import PtyProcess  # type: ignore[import-untyped]

from prorl_envs.sandbox.base import Begun
from prorl_envs.tools.dialects import BASH, SH, Dialect
from prorl_envs.tools.foreground import TIOCGPTN, Situation, by_line, look, settings

# From <asm-generic/ioctls.h>: signal the foreground process group of a pty, whatever its `stty isig` says.
_TIOCSIG = 0x40045436
ROWS, COLUMNS = 50, 160
#: Of a `siginfo_t`: why the process ended, and its status or signal.
_ENDING, _ENDING_SIZE = struct.Struct("=8xi12xi"), 128
#: Where a shell's descriptors are on the way to it: numbers that nothing of this process has.
_TEXT_FD, _REPORT_FD = 990, 991


class Terminal:
    """One running shell, bash or else `sh`. Does the system calls; decides nothing.

    Args:
        begun: its descriptors, owned from here on; without `exits` it is a child of this process.
        settings_raw: its terminal's, as it was begun.
    """

    def __init__(self, begun: Begun, dialect: Dialect, settings_raw: bytes) -> None:
        self.dialect = dialect
        self.pid = begun.pid
        self._process = PtyProcess(self.pid, begun.terminal)
        self.fd: int = self._process.fd
        self.report, self.pidfd = begun.report, begun.process
        self._text, self._exits = begun.text, begun.exits
        self._settings = settings_raw
        self._unread = False

    @classmethod
    def open(cls, cwd: str, env: Mapping[str, str]) -> Self:
        """Start a shell.

        Args:
            cwd: where it starts; where that cannot be entered, in the server's own directory.
            env: its whole environment.

        Raises:
            OSError: there is no shell, or no pseudo-terminal.
        """
        path, dialect = _find_shell(env)
        text = os.memfd_create("command", os.MFD_CLOEXEC)
        report, report_write = os.pipe()
        try:
            pid, master = _spawn(path, dialect, cwd, env, text, report_write)
        except BaseException:
            os.close(text)
            os.close(report)
            raise
        finally:
            os.close(report_write)
        os.set_blocking(report, False)
        begun = Begun(
            pid=pid, terminal=master, report=report, process=os.pidfd_open(pid), text=text, exits=-1
        )
        terminal = cls(begun, dialect, settings(master))
        terminal.prepare()
        return terminal

    def prepare(self) -> None:
        """What is typed first."""
        self._type(self.dialect.prepare.encode())

    def evaluate(self, text: str, *, nonce: str, status: int) -> None:
        """Have the shell evaluate `text`, with `$?` as it was, and report under `nonce`."""
        self._restore_settings()
        line, content = self.dialect.line(text, nonce=nonce, status=status)
        if content is not None:
            put_text(self._text, content)
        self._type(line)

    def ask_report(self, *, nonce: str, repair: bool = False) -> None:
        """Have the shell report once it reads its terminal again; `repair` it before."""
        self._restore_settings()
        self._type(self.dialect.ask_repaired(nonce) if repair else self.dialect.ask(nonce))

    def answer(self, keys: bytes) -> None:
        """Type into the program in the foreground."""
        self._unread = True
        self._type(keys)

    def lendable(self) -> bytes:
        """The terminal's settings, if another can drive the shell by typing alone; else nothing."""
        usual = self.dialect is BASH and not self._unread and settings(self.fd) == self._settings
        return self._settings if usual else b""

    def look(self) -> Situation:
        """What the foreground is doing."""
        return look(self.fd, report_fd=self.dialect.report_fd, shell=self.pid)

    @property
    def by_line(self) -> bool:
        """Whether the program in the foreground gets whole lines, not single keys."""
        return by_line(self.fd)

    def _restore_settings(self) -> None:
        # Whatever the last command did to the terminal. Asking is four times faster than setting.
        if self._unread:
            self._unread = False
            # Drops what was typed and never read.
            fcntl.ioctl(self.fd, termios.TCSETSF, self._settings)
        elif settings(self.fd) != self._settings:
            fcntl.ioctl(self.fd, termios.TCSETS, self._settings)

    def interrupt(self) -> None:
        """What Ctrl-C does, even where the terminal's settings would not let it."""
        fcntl.ioctl(self.fd, _TIOCSIG, signal.SIGINT)

    @property
    def at_prompt(self) -> bool:
        """Whether the shell itself is in the foreground."""
        return _foreground(self.fd) == self.pid

    def resume(self) -> None:
        """Let a stopped shell go on."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)

    def kill_foreground(self) -> None:
        """Kill the process group of the running command; the shell itself is spared if it is not in it."""
        _kill_foreground(self.fd, self.pid)

    def kill(self) -> None:
        """Kill the shell and its foreground."""
        _kill(self.fd, self.pid, self.pidfd)

    def reap(self) -> int:
        """The exit status of the ended shell, negative for a signal; waits for it."""
        if self._exits < 0:
            _, status = os.waitpid(self.pid, 0)
            return os.waitstatus_to_exitcode(status)
        os.set_blocking(self._exits, True)
        ending = os.read(self._exits, _ENDING_SIZE)
        if len(ending) < _ENDING_SIZE:  # who began it was killed
            return -signal.SIGKILL
        code, status = map(int, _ENDING.unpack_from(ending))
        return status if code == os.CLD_EXITED else -status

    def close(self) -> None:
        """Close all descriptors. The shell must have been reaped."""
        for fd in (self._text, self.report, self.pidfd, self._exits):
            if fd >= 0:
                os.close(fd)
        # Its own close() sleeps, and signals a process that is gone.
        self._process.fileobj.close()
        self._process.closed = True

    def _type(self, line: bytes) -> None:
        # A full input queue means a program that does not read: the deadline deals with it.
        with contextlib.suppress(BlockingIOError):
            os.write(self.fd, line)


def end(begun: Begun) -> None:
    """Kill a shell and its foreground, and close its descriptors."""
    _kill(begun.terminal, begun.pid, begun.process)
    for fd in (begun.terminal, begun.report, begun.process, begun.text, begun.exits):
        os.close(fd)


def put_text(fd: int, content: bytes) -> None:
    """Put a command's text into the memory file from which a shell reads it."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, content, 0)
    os.lseek(fd, 0, os.SEEK_SET)


def _find_shell(env: Mapping[str, str]) -> tuple[str, Dialect]:
    for dialect in (BASH, SH):
        path = shutil.which(dialect.name, path=env.get("PATH"))
        if path is not None:
            return path, dialect
    raise FileNotFoundError(2, "no bash and no sh in the sandbox's PATH")


def _spawn(
    path: str, dialect: Dialect, cwd: str, env: Mapping[str, str], text: int, report: int
) -> tuple[int, int]:
    master, slave = os.openpty()
    try:
        set_up(slave)
        number = fcntl.ioctl(master, TIOCGPTN, bytes(4))
        pid = _spawn_on(
            f"/dev/pts/{int.from_bytes(number, sys.byteorder)}", path, dialect, cwd, env, text, report
        )
    except BaseException:
        os.close(master)
        raise
    finally:
        os.close(slave)
    return pid, master


def set_up(terminal: int) -> None:
    """Make the settings of a new terminal a shell's."""
    # Before the shell sees them: it goes back to what it found when a command is killed.
    settings = termios.tcgetattr(terminal)
    settings[1] &= ~termios.OPOST  # "\n" stays "\n"
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, settings)
    termios.tcsetwinsize(terminal, (ROWS, COLUMNS))


def _spawn_on(
    terminal: str, path: str, dialect: Dialect, cwd: str, env: Mapping[str, str], text: int, report: int
) -> int:
    """Start the shell as the leader of a session of its own, whose terminal this is; return its pid.

    Not by `PtyProcess.spawn`, which forks: to copy this process's page tables and tear them down again takes
    longer than bash takes to start. The first terminal that a session's leader opens is the session's.
    """
    output = ((os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2))
    same = ((os.POSIX_SPAWN_DUP2, 0, fd) for fd in (1, 2))
    os.dup2(text, _TEXT_FD, inheritable=False)
    os.dup2(report, _REPORT_FD, inheritable=False)
    home = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # The directory is the sandbox's to remove or lock at any moment.
        with contextlib.suppress(OSError):
            os.chdir(cwd)
        return os.posix_spawn(
            path,
            [path, *dialect.options],
            {**env, "PS1": "", "PS2": ""},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, terminal, os.O_RDWR, 0),
                *(output if dialect.quiet else same),
                (os.POSIX_SPAWN_DUP2, _TEXT_FD, dialect.text_fd),
                (os.POSIX_SPAWN_DUP2, _REPORT_FD, dialect.report_fd),
            ],
            setsid=True,
            # Python ignores these, and what is ignored stays so in programs: `yes | head` would complain.
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
        )
    finally:
        os.fchdir(home)
        for fd in (home, _TEXT_FD, _REPORT_FD):
            os.close(fd)


def _kill(terminal: int, shell: int, pidfd: int) -> None:
    _kill_foreground(terminal, shell)
    with contextlib.suppress(ProcessLookupError):  # another has reaped it
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _kill_foreground(terminal: int, shell: int) -> None:
    group = _foreground(terminal)
    if group > 0 and _is_its(shell, group):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _is_its(shell: int, group: int) -> bool:
    # A terminal may name a group whose processes have all ended. The number can then be another's by now,
    # even of a process outside the sandbox.
    try:
        return os.getsid(group) == shell
    except ProcessLookupError:  # only the leader has ended, and keeps its number while the group lives
        return True


def _foreground(terminal: int) -> int:
    try:
        return os.tcgetpgrp(terminal)
    except OSError:
        return -1  # nobody has the terminal any more
