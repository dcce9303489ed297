"""State of a terminal's foreground, read from /proc: mainly, whether it waits for typed input.

A process waits for input if it is blocked in a read of the terminal, or in a poll, select or epoll of the
terminal alone. If the terminal delivers single keys, as for line editors and full-screen programs, a poll of
the terminal and other descriptors counts too. (In line mode, such a poll is typical of programs like ssh,
which wait for their peer.) The wait is not detected if a program reads the terminal from time to time without
blocking, if the /proc entries of a process are closed to its own user, or if the kernel closes these entries
for all processes (Yama's ptrace_scope 2 and 3). These commands run until their timeout.
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

#: From <asm-generic/ioctls.h>: get a terminal's number; open its slave side through the master.
TIOCGPTN, _TIOCGPTPEER = 0x80045430, 0x5441
_SLAVE_MAJOR = 136
#: Maximum number of examined threads, and of processes; others are ignored.
_THREAD_LIMIT = 512
_PROCESS_LIMIT = 8192

#: Maximum descriptors of a poll that is examined, and maximum bytes read of an epoll's description.
_POLL_LIMIT = 64
_EPOLL_LIMIT = 4096

_POLL_ENTRY = struct.Struct("=ihh")


class ForegroundKind(StrEnum):
    """Kind of call that waits for descriptors."""

    READ = "read"
    POLL = "poll"
    SELECT = "select"
    EPOLL = "epoll"


#: System calls that wait for input, by machine and number.
CALLS = {
    "x86_64": {
        **dict.fromkeys((0, 19), ForegroundKind.READ),
        **dict.fromkeys((7, 271), ForegroundKind.POLL),
        **dict.fromkeys((23, 270), ForegroundKind.SELECT),
        **dict.fromkeys((232, 281, 441), ForegroundKind.EPOLL),
    },
    "aarch64": {
        **dict.fromkeys((63, 65), ForegroundKind.READ),
        73: ForegroundKind.POLL,
        72: ForegroundKind.SELECT,
        **dict.fromkeys((22, 441), ForegroundKind.EPOLL),
    },
}


class ForegroundState(StrEnum):
    """State of the foreground."""

    BUSY = "busy"
    WAITING = "waiting for input"
    PROMPT = "the shell reads its next line"
    STOPPED = "the shell is stopped"


@dataclass(frozen=True, slots=True)
class ForegroundProcess:
    """Process of the foreground.

    Args:
        shell: True for the session's shell itself.
        stopped: True if a signal has stopped it.
        running: True if at least one of its threads is not blocked.
        reads: True if a thread waits for the terminal and nothing else.
        polls: True if a thread waits for the terminal or something else.
        reports: True if the report descriptor is open, as in the shell while it evaluates no command.
    """

    shell: bool
    stopped: bool
    running: bool
    reads: bool
    polls: bool
    reports: bool


def judge(processes: list[ForegroundProcess], *, by_line: bool) -> ForegroundState:
    """Return the foreground's state; `by_line` is True in the terminal's line ("canonical") mode. Pure."""
    if any(process.shell and process.stopped for process in processes):
        return ForegroundState.STOPPED
    if any(process.running for process in processes):
        return ForegroundState.BUSY
    readers = [process for process in processes if process.reads or (process.polls and not by_line)]
    if not readers:
        return ForegroundState.BUSY
    if all(process.shell and process.reports for process in readers):
        return ForegroundState.PROMPT
    return ForegroundState.WAITING


def parse_call(text: str) -> tuple[int, int, int] | None:
    """Return the number and the first two arguments of a call in /proc/PID/syscall; None without a call."""
    number, *arguments = text.split(" ", 3)
    if not number.isdigit() or len(arguments) < 2:  # "running", or -1 for a thread blocked outside any call
        return None
    try:
        return int(number), int(arguments[0], 16), int(arguments[1], 16)
    except ValueError:  # not written by a kernel
        return None


def polled(entries: bytes) -> set[int]:
    """Return the descriptors that a `struct pollfd` array asks to read from."""
    end = len(entries) // _POLL_ENTRY.size * _POLL_ENTRY.size
    return {
        fd for fd, events, _ in _POLL_ENTRY.iter_unpack(entries[:end]) if fd >= 0 and events & select.POLLIN
    }


def selected(bits: bytes) -> set[int]:
    """Return the descriptors in a select's bit array."""
    return {8 * index + bit for index, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1}


def watched(description: str) -> set[int]:
    """Return the descriptors that an epoll's /proc/PID/fdinfo lists."""
    fields = (line.split() for line in description.splitlines() if line.startswith("tfd:"))
    return {int(words[1]) for words in fields if len(words) > 1 and words[1].isascii() and words[1].isdigit()}


def settings(master: int) -> bytes:
    """Return the terminal's settings in the kernel's format."""
    return fcntl.ioctl(master, termios.TCGETS, bytes(64))


def by_line(master: int) -> bool:
    """Return True if the terminal delivers whole lines."""
    return bool(termios.tcgetattr(master)[3] & termios.ICANON)


def inspect_foreground(master: int, *, report_fd: int, shell: int) -> ForegroundState:
    """Return the foreground's state. Takes some tens of microseconds per process of the sandbox.

    Args:
        master: the terminal's master side.
        report_fd: number of the shell's descriptor for reports.
        shell: the shell's process id in this process's pid namespace.
    """
    # If input is available, a reader that seems blocked is about to wake up.
    if _has_unread_input(master):
        return ForegroundState.BUSY
    number = struct.unpack("I", fcntl.ioctl(master, TIOCGPTN, b"\0" * 4))[0]
    device = (number & 0xFF) | _SLAVE_MAJOR << 8 | (number & ~0xFF) << 12
    # If /proc shows this process, it may also show processes of other containers, whose terminals may have
    # the same device number. Otherwise, process ids in /proc differ from those of this namespace.
    session = shell if os.path.exists("/proc/self") else None  # noqa: PTH110
    inspector = _Inspector(
        names={f"/dev/pts/{number}", "/dev/tty"},
        calls=CALLS.get(os.uname().machine, {}),
        report_fd=report_fd,
    )
    processes = [inspector.process(pid, state, leads) for pid, state, leads in _foreground(device, session)]
    return judge(processes, by_line=by_line(master))


def _has_unread_input(master: int) -> bool:
    try:
        slave = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # the terminal has been hung up
        return False
    try:
        # The poll makes the kernel deliver input that is still buffered.
        poll = select.poll()
        poll.register(slave, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(slave)


def _foreground(device: int, session: int | None) -> Iterator[tuple[str, str, bool]]:
    """Yield id and state of each process in the terminal's foreground, and whether it leads the session."""
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
class _Inspector:
    """Inspector of processes, with a common limit of examined threads.

    Args:
        names: paths under which the terminal is open.
        calls: system calls of this machine.
        report_fd: see `inspect_foreground`.
        threads: number of threads examined.
    """

    names: set[str]
    calls: dict[int, ForegroundKind]
    report_fd: int
    threads: int = 0

    def process(self, pid: str, state: str, leads: bool) -> ForegroundProcess:
        running, reads, polls = state in "RD", False, False
        for thread in self._threads_of(pid):
            text = _read(f"/proc/{pid}/task/{thread}/syscall")
            call = parse_call(text)
            if call is None:
                running = running or text.startswith("running")
            elif call[0] in self.calls:
                fds = _descriptors(pid, self.calls[call[0]], call[1], call[2])
                if any(self._is_terminal(pid, fd) for fd in fds):
                    reads, polls = reads or len(fds) == 1, True
        reports = leads and os.path.lexists(f"/proc/{pid}/fd/{self.report_fd}")
        return ForegroundProcess(leads, state in "Tt", running and state not in "TtZX", reads, polls, reports)

    def _threads_of(self, pid: str) -> list[str]:
        try:
            threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
        except OSError:
            return []
        self.threads += len(threads)
        return threads if self.threads <= _THREAD_LIMIT else []

    def _is_terminal(self, pid: str, fd: int) -> bool:
        with contextlib.suppress(OSError):
            # Only the link is read, because opening its target might block.
            return os.readlink(f"/proc/{pid}/fd/{fd}") in self.names  # noqa: PTH115
        return False


def _descriptors(pid: str, kind: ForegroundKind, first: int, second: int) -> set[int]:
    """Return the descriptors for which a blocked call waits; the empty set if they cannot be determined."""
    match kind:
        case ForegroundKind.READ:
            return {first & 0xFFFFFFFF}
        case ForegroundKind.POLL if second <= _POLL_LIMIT:
            return polled(_memory(pid, first, second * _POLL_ENTRY.size))
        case ForegroundKind.SELECT if first <= _POLL_LIMIT:
            return {fd for fd in selected(_memory(pid, second, 8)) if fd < first}
        case ForegroundKind.EPOLL:
            return watched(_read(f"/proc/{pid}/fdinfo/{first & 0xFFFFFFFF}", _EPOLL_LIMIT))
    return set()


def _memory(pid: str, address: int, size: int) -> bytes:
    # OverflowError: the address is invalid, and the call has not checked it yet.
    with contextlib.suppress(OSError, OverflowError), open(f"/proc/{pid}/mem", "rb", 0) as file:  # noqa: PTH123
        return os.pread(file.fileno(), size, address)
    return b""


def _read(path: str, limit: int = 4096) -> str:
    # `os.open`, because `open` takes 50 % longer.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the process has exited, or its entries are closed to us
        return ""
    try:
        return os.read(fd, limit).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
