"""Queues of sockets: files whose descriptors wait in a Unix socket to be received, and bytes in buffers.

/proc shows neither. A socket is duplicated with pidfd_getfd(2), and its queue of descriptors is read with
MSG_PEEK: that returns duplicates of the descriptors and leaves the queue as it is.
"""

import array
import contextlib
import errno
import fcntl
import os
import socket
import stat
import termios
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prorl_envs.sandbox.limits.policy import ProcessUse
from prorl_envs.sandbox.limits.usage import parse_stat
from prorl_envs.sandbox.linux.descriptors import opened
from prorl_envs.sandbox.linux.syscall_wrappers import syscall

#: The same number on every architecture.
_PIDFD_GETFD = 438
#: Not in the `socket` module: see socket(7) and unix(7).
_SO_PEEK_OFF = 42
_SO_MEMINFO, _MEMINFO_BYTES = 55, 36
#: Most unread datagrams of a Unix socket (`net.unix.max_dgram_qlen`); FIONREAD returns the size of the first.
_DATAGRAMS = 10
#: Descriptors that one message can carry (SCM_MAX_FD).
_MOST_PER_MESSAGE = 253
#: Read size: more than one piece of a stream's queue, so that no piece is read twice.
_PIECE = 1 << 18
_MOST_MESSAGES = 10_000
#: The queues of a sandbox with more descriptors in flight are not read: it exceeds its share anyway.
_MOST_INSPECTED = 4096
#: Timeout in seconds for the read of a queue: a process inside can hold the socket's lock while it reads.
_PATIENCE_S = 1.0
_DESCRIPTION = 1024


@dataclass(slots=True)
class Queue:
    """Descriptors that wait in a socket, and in sockets that wait in it.

    Args:
        files: the status of each descriptor's file.
        nested: descriptors that wait in sockets which are themselves in flight.
        hidden: descriptors that the kernel counts but the queue did not show.
    """

    files: list[os.stat_result] = field(default_factory=list)
    nested: int = 0
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class WaitingSocket:
    """A socket, in which descriptors may wait.

    Args:
        process: a process that has it open.
        number: its descriptor there.
        file: its device and inode.
        count: descriptors that wait in it.
    """

    process: ProcessUse
    number: int
    file: tuple[int, int]
    count: int


def count_waiting(folder: int | None, path: str) -> int:
    """Return the number of descriptors that wait in a socket, from its `fdinfo`; 0 before Linux 5.10.

    Raises:
        OSError: the socket was closed meanwhile.
    """
    with opened(path, dir_fd=folder) as fd:
        _, _, rest = os.read(fd, _DESCRIPTION).partition(b"\nscm_fds:")
    return int(rest.split(b"\n", 1)[0] or 0)


def buffered(sockets: Sequence[WaitingSocket]) -> dict[int, int]:
    """Return the bytes in the buffers of sockets, by pid of a process that has the socket open.

    Nothing counts if this machine forbids duplicates.
    """
    host_pids = _on_host({waits.process for waits in sockets})
    own, unread = Counter[int](), Counter[int]()
    for waits in sockets:
        try:
            fd = _duplicate(waits, host_pids.get(waits.process, []))
        except PermissionError:
            return {}
        if fd is not None:
            with socket.socket(fileno=fd) as sock:
                size = _own_bytes(sock)
                own[waits.process.pid] += size
                unread[waits.process.pid] += _unread_bytes(sock) if sock.family == socket.AF_UNIX else size
    # A Unix socket's messages count for their sender, which may be closed, and again where they are unread.
    return max(own, unread, key=Counter.total)


def _own_bytes(sock: socket.socket) -> int:
    """Return the bytes that the kernel counts for a socket."""
    meminfo = array.array("I", sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO_BYTES))
    received, _, allocated, _, reserved, queued, options, backlog, *_ = meminfo
    return received + max(allocated, queued) + reserved + options + backlog


def _unread_bytes(sock: socket.socket) -> int:
    """Return the bytes that a Unix socket has not read."""
    first = array.array("i", [0])
    with contextlib.suppress(OSError):  # it listens
        fcntl.ioctl(sock, termios.FIONREAD, first)
    return first[0] * (_DATAGRAMS if sock.type == socket.SOCK_DGRAM else 1)


def read_queues(sockets: Sequence[WaitingSocket]) -> Iterator[tuple[WaitingSocket, Queue]]:
    """Yield the queue of each of a sandbox's sockets; an empty one if this machine forbids duplicates."""
    host_pids = _on_host({waits.process for waits in sockets}) if sockets else {}
    too_many = sum(waits.count for waits in sockets) > _MOST_INSPECTED
    for waits in sockets:
        try:
            fd = None if too_many else _duplicate(waits, host_pids.get(waits.process, []))
        except PermissionError:
            yield waits, Queue()
        else:
            yield waits, Queue(hidden=waits.count) if fd is None else _read_in_time(waits, fd)


def _read_in_time(waits: WaitingSocket, fd: int) -> Queue:
    """Read a queue in a thread, and close `fd`. After a timeout, all its descriptors count as hidden."""
    queue = Queue()

    def read() -> None:
        try:
            _read(fd, waits.count, queue, {waits.file})
        finally:
            os.close(fd)

    reader = threading.Thread(target=read, name="in flight", daemon=True)
    reader.start()
    reader.join(_PATIENCE_S)
    return Queue(hidden=waits.count) if reader.is_alive() else queue


def _read(sock: int, count: int, queue: Queue, seen: set[tuple[int, int]]) -> None:
    """Read a queue recursively. The kernel allows at most four levels of sockets in flight."""
    number = 0
    for fds in _messages(sock):
        number += len(fds)
        try:
            for fd in fds:
                _add(fd, queue, seen)
        finally:
            for fd in fds:
                os.close(fd)
        if number >= count:
            break
    queue.hidden += max(0, count - number)


def _add(fd: int, queue: Queue, seen: set[tuple[int, int]]) -> None:
    """Add the status of one descriptor; read the queue of a socket."""
    status = os.fstat(fd)
    queue.files.append(status)
    file = (status.st_dev, status.st_ino)
    if stat.S_ISSOCK(status.st_mode) and file not in seen:
        seen.add(file)
        if inner := count_waiting(None, f"/proc/self/fdinfo/{fd}"):
            queue.nested += inner
            _read(fd, inner, queue, seen)


def _messages(fd: int) -> Iterator[list[int]]:
    """Yield duplicates of the descriptors that wait in a socket, per message. The caller closes them."""
    sock = socket.socket(fileno=os.dup(fd))
    try:
        before = sock.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF)
        sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, 0)
        try:
            for _ in range(_MOST_MESSAGES):
                received = _peek(sock)
                if received is None:
                    break
                yield received
        finally:
            sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, before)
    except OSError:
        return  # the socket has no queue: it listens, or was closed
    finally:
        sock.close()


def _peek(sock: socket.socket) -> list[int] | None:
    """Return the descriptors of the next piece of the queue; None at its end."""
    space = socket.CMSG_SPACE(_MOST_PER_MESSAGE * array.array("i").itemsize)
    flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        data, ancillary, _, _ = sock.recvmsg(_PIECE, space, flags)
    except BlockingIOError:
        return None
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return fds.tolist() if data or fds else None


def duplicates(process: ProcessUse, numbers: Sequence[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the status of the files behind descriptors of a process, by duplicating each for a moment.

    Raises:
        OSError: the process has exited, or this machine forbids duplicates.
    """
    for pid in _on_host({process}).get(process, [])[:1]:
        pidfd = os.pidfd_open(pid)
        try:
            for number in numbers:
                try:
                    fd = syscall(_PIDFD_GETFD, pidfd, int(number), 0)
                except OSError as error:
                    if error.errno == errno.EBADF:  # closed meanwhile
                        continue
                    raise
                try:
                    yield number, os.fstat(fd)
                finally:
                    os.close(fd)
        finally:
            os.close(pidfd)


def _duplicate(waits: WaitingSocket, candidates: Sequence[int]) -> int | None:
    """Return a duplicate of the socket; None if no candidate has it: a thread's own table may.

    Raises:
        PermissionError: this machine forbids duplicates.
    """
    for pid in candidates:
        with contextlib.suppress(ProcessLookupError):  # it has exited meanwhile
            pidfd = os.pidfd_open(pid)
            try:
                fd = syscall(_PIDFD_GETFD, pidfd, waits.number, 0)
            except OSError as error:
                if error.errno in (errno.EPERM, errno.ENOSYS):
                    raise PermissionError(error.errno, "pidfd_getfd") from error
                continue
            finally:
                os.close(pidfd)
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) == waits.file:
                return fd
            os.close(fd)
    return None


def _on_host(processes: Collection[ProcessUse]) -> dict[ProcessUse, list[int]]:
    """Return the host pids of a sandbox's processes, found by pid inside and start time."""
    found: dict[ProcessUse, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names alone
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has exited meanwhile
                _, _, rest = Path(f"/proc/{name}/status").read_bytes().partition(b"\nNSpid:")
                numbers = [int(number) for number in rest.partition(b"\n")[0].split()]
                for process in processes:
                    if process.pid in numbers and _start(name) == process.start:
                        found.setdefault(process, []).append(int(name))
    return found


def _start(pid: str) -> int | None:
    process = parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
    return None if process is None else process.start
