"""Limits of open files, processes and memory that this process has; descriptors received over Unix sockets,
or closed in forks.

The kernel counts the descriptors in flight (sent over Unix sockets and not yet received) per host user, and
refuses to send if they are more than the sender's own soft limit of open files: see `too_many_unix_fds` in
net/core/scm.c. So this process and its templates keep a higher limit than programs in sandboxes can have.
"""

import array
import contextlib
import errno
import os
import resource
import select
import socket
import stat
from collections.abc import Collection, Iterable, Iterator

from prorl_envs.errors import NoRoom, UnsupportedMachine

_SIZE = array.array("i").itemsize
#: Maximum of open descriptors of this process, if the machine allows it. Twice the default limit of programs
#: in sandboxes; not more, because some programs iterate over all possible numbers.
_MAX_DESCRIPTORS = 131_072
#: Descriptors of one sandbox with a shell and a Python session (measured: 6; 4 without Python).
_PER_SANDBOX = 6
#: Processes of one sandbox: bubblewrap, the first one, the tool server and the shell, and four for commands.
_PROCESSES_PER_SANDBOX = 8
#: Bytes of memory that must be available for a further sandbox.
_RESERVED_MEMORY = 256 << 20
#: Minimum that the tools need.
_MIN_DESCRIPTORS = 1024
#: Least difference between this process's own limit and that of programs in sandboxes: one message can exceed
#: the limit that the kernel compares by up to 253 descriptors.
_HEADROOM = 512
#: Minimum of processes and threads, for the service and some sandboxes. With 200, some sandboxes failed.
_MIN_PROCESSES = 400
#: Soft limit of programs in sandboxes, which they may raise to the hard one.
SOFT_OPEN_FILES = 4096
#: Errors of system calls if a limit of the machine is reached, perhaps by other sandboxes.
_SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
#: Reserved for closing sandboxes: without a free descriptor, not even a directory can be removed.
_RESERVE = 128
#: Files that libraries of this process keep open: descriptor, path, device and inode.
_of_libraries: list[tuple[int, str, int, int]] = []


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, dir_fd: int | None = None
) -> Iterator[int]:
    """Open a file during the block. Raise OSError if it cannot be opened."""
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def allow_many() -> None:
    """Raise this process's soft limit of descriptors to the hard one, at most to `_MAX_DESCRIPTORS`.

    Raises:
        UnsupportedMachine: the hard limit is too low for a single sandbox.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _hard_limit()
    if soft != resource.RLIM_INFINITY and soft < min(hard, _MAX_DESCRIPTORS):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MAX_DESCRIPTORS), hard))


def _hard_limit() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < _MIN_DESCRIPTORS + _HEADROOM:
        raise UnsupportedMachine(
            f"a process may open no more than {hard} files here; the service needs "
            f"{_MIN_DESCRIPTORS + _HEADROOM}: {_MIN_DESCRIPTORS} for programs in sandboxes, "
            f"{_HEADROOM} more itself",
            hint="raise the hard limit: `ulimit -Hn`, LimitNOFILE= of systemd",
        )
    return _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard


def sandboxes_allowed() -> int:
    """Return how many sandboxes this process's hard limits of descriptors and processes allow.

    Raises:
        UnsupportedMachine: a limit is too low for a single sandbox.
    """
    allowed = (min(_hard_limit(), _MAX_DESCRIPTORS) - _HEADROOM - _RESERVE) // _PER_SANDBOX
    _, processes = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() == 0 or processes == resource.RLIM_INFINITY:
        return allowed
    return min(allowed, max(1, (processes - _MIN_PROCESSES) // _PROCESSES_PER_SANDBOX))


def allow_processes() -> None:
    """Raise this process's own soft limit of processes and threads to the hard one. Root has none.

    Raises:
        UnsupportedMachine: the hard limit is too low for some sandboxes beside the service.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() == 0 or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < _MIN_PROCESSES:
        raise UnsupportedMachine(
            f"this user may have no more than {hard} processes and threads; the service needs "
            f"{_MIN_PROCESSES}",
            hint="raise the hard limit: `ulimit -Hu`, LimitNPROC= of systemd",
        )
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))


def open_files_inside(wanted: int) -> int:
    """Return the open file limit of programs in sandboxes: `wanted`, or less if this process's own is low.

    At most three quarters of this process's own limit, so that it stays clearly below.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(_MIN_DESCRIPTORS, soft - max(_HEADROOM, soft // 4)))


def check_room(sandboxes: int) -> None:
    """Check that a further sandbox leaves what the open ones still need, in number `sandboxes`.

    Raises:
        NoRoom: there are as many as are allowed, nearly all descriptors are open, or memory is used up.
    """
    if sandboxes >= sandboxes_allowed():
        raise NoRoom(f"this process's limits allow {sandboxes} sandboxes", hint="`ulimit -Hn`, `ulimit -Hu`")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        lowest = limit
    else:
        os.close(lowest)
    if limit != resource.RLIM_INFINITY and lowest > limit - _RESERVE:
        raise NoRoom(
            f"this process has nearly all of its {limit} descriptors open",
            hint="raise the hard limit (`ulimit -Hn`), or have fewer sandboxes at once (service.run)",
        )
    with open("/proc/meminfo", "rb") as file:  # noqa: PTH123 - templates import no pathlib
        available = next(int(line.split()[1]) << 10 for line in file if line.startswith(b"MemAvailable:"))
    if available < _RESERVED_MEMORY:
        raise NoRoom(f"only {available >> 20} MB of memory are available", hint="lower service.run")


def is_shortage(error: BaseException) -> bool:
    """Return whether a start may have failed because processes, descriptors or memory are used up."""
    said = any(os.strerror(number) in str(error) for number in _SHORTAGES)  # by bubblewrap or Apptainer
    return said or errno_behind(error, _SHORTAGES) is not None


def errno_behind(error: BaseException, numbers: Collection[int]) -> int | None:
    """Return the first of these error numbers among the causes of `error`; None if there is none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in numbers:
            return cause.errno
        cause = cause.__cause__ or cause.__context__
    return None


def receive_descriptors(sock: socket.socket, size: int, count: int) -> tuple[bytes, list[int]]:
    """Receive one message with up to `count` descriptors, which programs started from here do not inherit.

    `socket.recv_fds` ignores its flags (seen in Python 3.12), so its descriptors would be inherited.

    Returns:
        The bytes (empty at end of file) and the descriptors, which the caller owns.

    Raises:
        OSError: as `recvmsg` does.
    """
    descriptors = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_LEN(count * _SIZE), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % _SIZE])
    return data, list(descriptors)


def pid_of(pidfd: int) -> int:
    """Return the local pid of the process behind `pidfd`; -1 if it has exited."""
    # A text file object would cost more than everything else here.
    with opened(f"/proc/self/fdinfo/{pidfd}") as info:
        _, _, behind = os.read(info, 4096).partition(b"\nPid:")
    return int(behind.partition(b"\n")[0])


def has_exited(pidfd: int) -> bool:
    """Return whether the process of `pidfd` and all its threads have exited. It may not be reaped yet."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def note_library_descriptors() -> None:
    """Remember the descriptors of shared libraries that this process has opened, for `reopen_libraries`.

    libffi, which ctypes loads, maps a part of its own file for each callback. Since version 3.5 it opens the
    file when it is loaded, so that callbacks would fail in a fork without this descriptor.
    """
    with open("/proc/self/maps", "rb") as file:  # noqa: PTH123 - templates import no pathlib
        mapped = {int(line.split()[4]) for line in file}
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the descriptor that lists is closed
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and status.st_ino in mapped:
                path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
                _of_libraries.append((fd, path, status.st_dev, status.st_ino))


def reopen_libraries() -> None:
    """Open the files of `note_library_descriptors` again, at the same numbers, in a fork that closed them.

    The template's own descriptors must not get into a sandbox: they belong to a writable mount of the host,
    so that the owner of a file could change its mode. If the file is missing inside, or is another one, the
    descriptor stays closed.
    """
    for number, path, device, inode in _of_libraries:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            status = os.fstat(fd)
            is_same = (status.st_dev, status.st_ino) == (device, inode)
            if is_same and fd != number:
                os.dup2(fd, number, inheritable=False)
            if not is_same or fd != number:
                os.close(fd)


def close_all_but(keep: Iterable[int]) -> None:
    """Close all descriptors except `keep` and 0 to 2."""
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))
