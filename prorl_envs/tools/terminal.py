"""A bash on a pseudo-terminal, and the descriptors through which it is driven.

The shell is interactive, so that an interrupt ends the command and not the shell. Its terminal carries only
the commands' input and output. A line typed into it makes the shell evaluate the command's text, which is
quoted in that line or, if long, lies in a memory file at `TEXT_FD`: a syntax error or an unclosed quote ends
with the text. The end of the command, its status and its directory come back over a pipe at `REPORT_FD`. Both
descriptors are closed for the command itself.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import termios
from collections.abc import Mapping, Sequence
from functools import partial

from ptyprocess import PtyProcess  # type: ignore[import-untyped]

# High enough that no script uses them, low enough for the customary limit of 1,024 descriptors.
TEXT_FD, REPORT_FD = 990, 991

# From <asm-generic/ioctls.h>: signal the foreground process group of a pty, whatever its `stty isig` says.
_TIOCSIG = 0x40045436
_ROWS, _COLUMNS = 50, 160

#: History off, so that no history file appears in the workspace; no prompt in the environment of children.
_PREPARE = (
    b"\\builtin set +o history +H; \\builtin history -c; \\builtin unset HISTFILE; "
    b"\\builtin export -n PS1 PS2\n"
)
# The empty line first makes the shell note which background jobs have ended while job control is off: then
# it says nothing about them. Job control is on for the command alone, so that it has a process group of its
# own to be signalled.
_EVALUATE = f"\n%s\\builtin set -m; %s\\builtin eval %s {TEXT_FD}<&- {REPORT_FD}>&-; "
_READ = f"IFS= \\builtin read -rd '' -u {TEXT_FD} __command; "
# `errexit` and tracing last for the command that sets them: a shell that keeps errexit would end at the next
# failing command. What tracing says of these lines themselves goes into the report, before the nonce.
_REPORT = (
    '{ __status=$?; \\builtin set +exvm; \\builtin printf \'%%s %%s %%s\\0\' %s "$__status" "$PWD"; } '
    f">&{REPORT_FD} 2>&1; PS0= PS1= PS2= PROMPT_COMMAND=\n"
)
#: Characters of the longest command typed into the terminal itself, whose lines hold 4,095 bytes: the way
#: through the file costs 25 microseconds more.
_TYPED_LIMIT = 500


class Terminal:
    """One running bash. Does the system calls; decides nothing.

    Args:
        cwd: where it starts; where that cannot be entered, in the server's own directory.
        env: its whole environment.

    Raises:
        OSError: there is no bash, or no pseudo-terminal.
    """

    def __init__(self, cwd: str, env: Mapping[str, str]) -> None:
        self._text = os.memfd_create("command", os.MFD_CLOEXEC)
        self.report, report_write = os.pipe()
        try:
            self._process = _spawn(cwd, env, self._text, report_write)
        except BaseException:
            os.close(self._text)
            os.close(self.report)
            raise
        finally:
            os.close(report_write)
        self.pid: int = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.fd: int = self._process.fd
        os.set_blocking(self.report, False)
        self._settings = termios.tcgetattr(self.fd)
        self._settings[1] &= ~termios.OPOST  # "\n" stays "\n"
        self._settings[3] &= ~termios.ECHO
        termios.tcsetattr(self.fd, termios.TCSANOW, self._settings)
        self._settings = termios.tcgetattr(self.fd)  # in the kernel's own words, to compare with
        self._type(_PREPARE)

    def evaluate(self, text: str, *, nonce: str, status: int) -> None:
        """Have the shell evaluate `text`, with `$?` as it was, and report under `nonce`."""
        self._restore_settings()
        restore = f"(exit {status}); " if status else ""
        if len(text) <= _TYPED_LIMIT and text.isprintable():
            quoted = "'" + text.replace("'", "'\\''") + "'"
            line = _EVALUATE % ("", restore, quoted)
        else:
            os.ftruncate(self._text, 0)
            os.pwrite(self._text, text.encode() + b"\0", 0)
            os.lseek(self._text, 0, os.SEEK_SET)
            line = _EVALUATE % (_READ, restore, '"$__command"')
        self._type((line + _REPORT % nonce).encode())

    def ask_report(self, *, nonce: str) -> None:
        """Have the shell report once it reads its terminal again."""
        self._restore_settings()
        self._type((_REPORT % nonce).encode())

    def _restore_settings(self) -> None:
        # Whatever the last command did to the terminal. Asking is four times faster than setting.
        if termios.tcgetattr(self.fd) != self._settings:
            termios.tcsetattr(self.fd, termios.TCSANOW, self._settings)

    def interrupt(self) -> None:
        """What Ctrl-C does, even where the terminal's settings would not let it."""
        fcntl.ioctl(self.fd, _TIOCSIG, signal.SIGINT)

    @property
    def at_prompt(self) -> bool:
        """Whether the shell itself is in the foreground."""
        return self._foreground() == self.pid

    def kill_foreground(self) -> None:
        """Kill the process group of the running command; the shell itself is spared if it is not in it."""
        group = self._foreground()
        if group > 0 and self._is_ours(group):
            _signal_group(group, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the shell and its foreground."""
        self.kill_foreground()
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int:
        """The exit status of the ended shell, negative for a signal; waits for it."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """Close all descriptors. The shell must have been reaped."""
        for fd in (self._text, self.report, self.pidfd):
            os.close(fd)
        # Its own close() sleeps, and signals a process that is gone.
        self._process.fileobj.close()
        self._process.closed = True

    def _is_ours(self, group: int) -> bool:
        # A terminal may name a group whose processes have all ended. The number can then be another's by now,
        # even of a process outside the sandbox.
        try:
            return os.getsid(group) == self.pid
        except ProcessLookupError:  # only the leader has ended, and keeps its number while the group lives
            return True

    def _foreground(self) -> int:
        try:
            return os.tcgetpgrp(self.fd)
        except OSError:
            return -1  # nobody has the terminal any more

    def _type(self, line: bytes) -> None:
        # A full input queue means a program that does not read: the deadline deals with it.
        with contextlib.suppress(BlockingIOError):
            os.write(self.fd, line)


def _spawn(cwd: str, env: Mapping[str, str], text: int, report: int) -> PtyProcess:
    path = shutil.which("bash", path=env.get("PATH"))
    if path is None:
        raise FileNotFoundError(2, "no bash in the sandbox's PATH")
    argv: Sequence[str] = [path, "--norc", "--noprofile", "--noediting", "-i"]
    os.dup2(text, TEXT_FD, inheritable=True)
    os.dup2(report, REPORT_FD, inheritable=True)
    try:
        return PtyProcess.spawn(
            argv,
            env={**env, "PS1": "", "PS2": ""},
            echo=False,
            # Not its own `cwd`: where that fails, the child goes on as a copy of this server.
            preexec_fn=partial(_before_exec, cwd),
            dimensions=(_ROWS, _COLUMNS),
            pass_fds=(TEXT_FD, REPORT_FD),
        )
    finally:
        os.close(TEXT_FD)
        os.close(REPORT_FD)


def _before_exec(cwd: str) -> None:
    # The directory is the sandbox's to remove or lock at any moment.
    with contextlib.suppress(OSError):
        os.chdir(cwd)
    # Python ignores these, and an ignored signal stays ignored across exec: `yes | head` would complain.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
