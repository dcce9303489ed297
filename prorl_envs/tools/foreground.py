"""What the foreground of a terminal is doing, read from /proc. Whether it waits to be typed at, above all.

A process waits for input if it is blocked in a read of the terminal, or in a poll of whatever kind while the
terminal hands over single keys (as line editors and full-screen programs have it). Not seen: a program that
polls a terminal that hands over whole lines; one whose /proc entry is closed to its own user; a kernel that
keeps /proc/PID/syscall closed (Yama's ptrace_scope 2 and 3). Those run until their time is up.
"""

import contextlib
import fcntl
import os
import select
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

#: From <asm-generic/ioctls.h>: the terminal's number; its slave side, opened by way of the master.
_TIOCGPTN, _TIOCGPTPEER = 0x80045430, 0x5441
_SLAVE_MAJOR = 136
#: Threads looked at, and descriptors of one process: beyond, nothing is found.
_THREAD_LIMIT = 512
_PROCESS_LIMIT = 8192

#: Numbers of the calls that read, and of those that wait for one of several descriptors.
_READS = {"x86_64": {0, 19}, "aarch64": {63, 65}}
_POLLS = {"x86_64": {7, 23, 232, 270, 271, 281, 441}, "aarch64": {22, 72, 73, 441}}


class Situation(StrEnum):
    """What the foreground is doing."""

    BUSY = "busy"
    WAITING = "waiting for input"
    PROMPT = "the shell reads its next line"
    STOPPED = "the shell is stopped"


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the foreground.

    Args:
        shell: whether it is the session's shell itself.
        stopped: by a signal.
        running: at least one of its threads is not blocked.
        reads: a thread is blocked in a read of the terminal.
        polls: a thread is blocked in a poll.
        reports: the descriptor for reports is open, as the shell's is while it evaluates no command.
    """

    shell: bool
    stopped: bool
    running: bool
    reads: bool
    polls: bool
    reports: bool


def judge(processes: list[Process], *, by_line: bool) -> Situation:
    """Pure. `by_line` says that the terminal hands over whole lines ("canonical mode")."""
    if any(process.shell and process.stopped for process in processes):
        return Situation.STOPPED
    if any(process.running for process in processes):
        return Situation.BUSY
    readers = [process for process in processes if process.reads or (process.polls and not by_line)]
    if not readers:
        return Situation.BUSY
    if all(process.shell and process.reports for process in readers):
        return Situation.PROMPT
    return Situation.WAITING


def parse_call(text: str) -> tuple[int, int] | None:
    """Number and first argument of the call that /proc/PID/syscall shows; None where it runs."""
    number, _, rest = text.partition(" ")
    if not number.isdigit():  # "running", or -1 for one that is blocked outside any call
        return None
    return int(number), int(rest.split(" ", 1)[0], 16)


def by_line(master: int) -> bool:
    """Whether the terminal hands over whole lines."""
    return bool(termios.tcgetattr(master)[3] & termios.ICANON)


def look(master: int, *, report_fd: int, shell: int) -> Situation:
    """Look once. Takes some tens of microseconds for each process of the sandbox.

    Args:
        master: the terminal's master side.
        report_fd: number of the shell's descriptor for reports.
        shell: the shell's process id as this process knows it.
    """
    # First: a read that has input is not one that waits, but its process may not have woken up yet.
    if _has_unread_input(master):
        return Situation.BUSY
    machine = os.uname().machine
    number = struct.unpack("I", fcntl.ioctl(master, _TIOCGPTN, b"\0" * 4))[0]
    device = (number & 0xFF) | _SLAVE_MAJOR << 8 | (number & ~0xFF) << 12
    # Numbers in the sandbox's /proc are none of ours, except where both are in one pid namespace; there, a
    # terminal of another container may have the same device number.
    session = shell if os.path.exists("/proc/self") else None  # noqa: PTH110
    looked = _Look(
        names={f"/dev/pts/{number}", "/dev/tty"},
        reads=_READS.get(machine, set()),
        polls=_POLLS.get(machine, set()),
        report_fd=report_fd,
    )
    processes = [looked.process(pid, state, leads) for pid, state, leads in _foreground(device, session)]
    return judge(processes, by_line=by_line(master))


def _has_unread_input(master: int) -> bool:
    try:
        slave = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # it has been hung up
        return False
    try:
        # Asking has the kernel deliver what is still on its way.
        poll = select.poll()
        poll.register(slave, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(slave)


def _foreground(device: int, session: int | None) -> Iterator[tuple[str, str, bool]]:
    """Process id, state, and whether it leads the session, of each process in the terminal's foreground."""
    names = [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    for name in names[:_PROCESS_LIMIT]:
        # state, parent, group, session, terminal, foreground group of the terminal
        fields = _read(f"/proc/{name}/stat").rpartition(") ")[2].split(" ", 6)
        if len(fields) < 7:
            continue
        state, _, group, leader, terminal, foreground = fields[:6]
        if int(terminal) == device and group == foreground and session in (None, int(leader)):
            yield name, state, leader == name


@dataclass(slots=True)
class _Look:
    """Looks at one process after the other.

    Args:
        names: paths under which the terminal is open.
        reads: numbers of reading calls on this machine.
        polls: numbers of polling calls.
        report_fd: as for `look`.
        threads: how many have been looked at.
    """

    names: set[str]
    reads: set[int]
    polls: set[int]
    report_fd: int
    threads: int = 0

    def process(self, pid: str, state: str, leads: bool) -> Process:
        running, reads, polls = state in "RD", False, False
        for thread in self._threads_of(pid):
            text = _read(f"/proc/{pid}/task/{thread}/syscall")
            call = parse_call(text)
            if call is None:
                running = running or text.startswith("running")
            elif call[0] in self.reads:
                reads = reads or self._is_terminal(pid, call[1])
            elif call[0] in self.polls:
                polls = True
        reports = leads and os.path.lexists(f"/proc/{pid}/fd/{self.report_fd}")
        return Process(leads, state in "Tt", running and state not in "TtZX", reads, polls, reports)

    def _threads_of(self, pid: str) -> list[str]:
        try:
            threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
        except OSError:
            return []
        self.threads += len(threads)
        return threads if self.threads <= _THREAD_LIMIT else []

    def _is_terminal(self, pid: str, fd: int) -> bool:
        with contextlib.suppress(OSError):
            # Not what it leads to, which might be a file that never answers.
            return os.readlink(f"/proc/{pid}/fd/{fd}") in self.names  # noqa: PTH115
        return False


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read().decode("ascii", "replace")
    except OSError:  # it has ended, or is closed to us
        return ""
