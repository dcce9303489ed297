"""What the foreground of a terminal is doing, read from /proc. Whether it waits to be typed at, above all.

A process waits for input if it is blocked in a read of the terminal; or in a poll, select or epoll of the
terminal alone; or of the terminal and more, while the terminal hands over single keys, as line editors and
full-screen programs have it (in line mode that is a program like ssh, which waits for the other end). Not
seen: what reads the terminal now and then without waiting; a process whose /proc entries are closed to its
own user; anything where the kernel keeps them closed (Yama's ptrace_scope 2 and 3). Those run until their
time is up.
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
TIOCGPTN, _TIOCGPTPEER = 0x80045430, 0x5441
_SLAVE_MAJOR = 136
#: Threads looked at, and descriptors of one process: beyond, nothing is found.
_THREAD_LIMIT = 512
_PROCESS_LIMIT = 8192

#: Descriptors of the longest poll looked into, and bytes of an epoll's description.
_POLL_LIMIT = 64
_EPOLL_LIMIT = 4096

_POLL_ENTRY = struct.Struct("=ihh")


class Kind(StrEnum):
    """How a call waits for its descriptors."""

    READ = "read"
    POLL = "poll"
    SELECT = "select"
    EPOLL = "epoll"


#: The calls that wait for input, by machine and number.
CALLS = {
    "x86_64": {
        **dict.fromkeys((0, 19), Kind.READ),
        **dict.fromkeys((7, 271), Kind.POLL),
        **dict.fromkeys((23, 270), Kind.SELECT),
        **dict.fromkeys((232, 281, 441), Kind.EPOLL),
    },
    "aarch64": {
        **dict.fromkeys((63, 65), Kind.READ),
        73: Kind.POLL,
        72: Kind.SELECT,
        **dict.fromkeys((22, 441), Kind.EPOLL),
    },
}


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
        reads: a thread waits for the terminal and nothing else.
        polls: a thread waits for the terminal or something else.
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


def parse_call(text: str) -> tuple[int, int, int] | None:
    """Number and first arguments of the call that /proc/PID/syscall shows; None where it shows none."""
    number, *arguments = text.split(" ", 3)
    if not number.isdigit() or len(arguments) < 2:  # "running", or -1 for one blocked outside any call
        return None
    try:
        return int(number), int(arguments[0], 16), int(arguments[1], 16)
    except ValueError:  # nothing that a kernel writes
        return None


def polled(entries: bytes) -> set[int]:
    """The descriptors that a `struct pollfd` array asks to read from."""
    whole = len(entries) // _POLL_ENTRY.size * _POLL_ENTRY.size
    return {
        fd for fd, events, _ in _POLL_ENTRY.iter_unpack(entries[:whole]) if fd >= 0 and events & select.POLLIN
    }


def selected(bits: bytes) -> set[int]:
    """The descriptors in a select's bit array."""
    return {8 * place + bit for place, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1}


def watched(description: str) -> set[int]:
    """The descriptors that an epoll's /proc/PID/fdinfo lists."""
    fields = (line.split() for line in description.splitlines() if line.startswith("tfd:"))
    return {int(words[1]) for words in fields if len(words) > 1 and words[1].isascii() and words[1].isdigit()}


def settings(master: int) -> bytes:
    """The terminal's settings, as the kernel has them."""
    return fcntl.ioctl(master, termios.TCGETS, bytes(64))


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
    number = struct.unpack("I", fcntl.ioctl(master, TIOCGPTN, b"\0" * 4))[0]
    device = (number & 0xFF) | _SLAVE_MAJOR << 8 | (number & ~0xFF) << 12
    # Numbers in the sandbox's /proc are none of ours, except where both are in one pid namespace; there, a
    # terminal of another container may have the same device number.
    session = shell if os.path.exists("/proc/self") else None  # noqa: PTH110
    looked = _Look(
        names={f"/dev/pts/{number}", "/dev/tty"},
        calls=CALLS.get(os.uname().machine, {}),
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
        calls: those of this machine.
        report_fd: as for `look`.
        threads: how many have been looked at.
    """

    names: set[str]
    calls: dict[int, Kind]
    report_fd: int
    threads: int = 0

    def process(self, pid: str, state: str, leads: bool) -> Process:
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


def _descriptors(pid: str, kind: Kind, first: int, second: int) -> set[int]:
    """What a thread blocked in a call with these arguments waits for; nothing where that cannot be told."""
    match kind:
        case Kind.READ:
            return {first & 0xFFFFFFFF}
        case Kind.POLL if second <= _POLL_LIMIT:
            return polled(_memory(pid, first, second * _POLL_ENTRY.size))
        case Kind.SELECT if first <= _POLL_LIMIT:
            return {fd for fd in selected(_memory(pid, second, 8)) if fd < first}
        case Kind.EPOLL:
            return watched(_read(f"/proc/{pid}/fdinfo/{first & 0xFFFFFFFF}", _EPOLL_LIMIT))
    return set()


def _memory(pid: str, address: int, size: int) -> bytes:
    # OverflowError: an address that is none, which the call has not noticed yet.
    with contextlib.suppress(OSError, OverflowError), open(f"/proc/{pid}/mem", "rb", 0) as file:  # noqa: PTH123
        return os.pread(file.fileno(), size, address)
    return b""


def _read(path: str, limit: int = 4096) -> str:
    # Not `open`, which takes half as long again.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it has ended, or is closed to us
        return ""
    try:
        return os.read(fd, limit).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
