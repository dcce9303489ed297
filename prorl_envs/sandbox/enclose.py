"""Makes a sandbox by the kernel's own calls, from the options that bubblewrap would get.

Runs in a fork of a template (`zygote.py`), which goes into new namespaces, mounts what the options ask for,
and stays: a tool server that need not join what it has made, nor be forked for it. Of the pid namespace it is
no part; the sandbox's first process is a program of its own (`waiter.py`). It knows nothing of the host side.

What bubblewrap does is done, in its order. The host's root is moved away first, so that no link in an image
leads there. Mounts belong to a user namespace above the one that the sandbox's processes are in, below which
there can be no other. See mount_namespaces(7), user_namespaces(7), pivot_root(2), and mount_setattr(2), which
needs Linux 5.12.
"""

# The template imports no pathlib, which each of its forks would pay for.
# ruff: noqa: PTH102, PTH112, PTH120, PTH211

import errno
import fcntl
import functools
import os
import signal
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prorl_envs.sandbox.syscalls import (
    PR_SET_NO_NEW_PRIVS,
    detach,
    mount,
    mount_attributes,
    open_in_root,
    pivot_root,
    prctl,
)
from prorl_envs.sandbox.waiter import FOLDER, MAKER, PROCESSES, READY, ROOT, waiter

_NAMESPACES = (
    os.CLONE_NEWUSER
    | os.CLONE_NEWNS
    | os.CLONE_NEWPID
    | os.CLONE_NEWIPC
    | os.CLONE_NEWUTS
    | os.CLONE_NEWCGROUP
)
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_SLAVE = 1 << 12, 1 << 14, 1 << 18, 1 << 19
_READ_ONLY, _NO_SETUID, _NO_DEVICES = 1, 2, 4  # mount_setattr's

#: Where the host's root is meanwhile, and a directory to begin with.
_HOST, _BASE = "/host", "/tmp"
#: Above the numbers that the first process's descriptors get.
_HIGH = 16
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "fd": "/proc/self/fd",
    "core": "/proc/kcore",
    "ptmx": "pts/ptmx",
}
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_INTERFACE = struct.Struct("=16sH22x")


def enclose(request: Mapping[str, Any], lifetime: int) -> int:
    """Make a sandbox around this process, which has one thread. What it has of capabilities then, and of
    descriptors that lead out, is still to go.

    Args:
        request: `mounts` are bubblewrap's options for them; `uid` is the user and group inside; `hostname`;
            `network`, whether the sandbox gets one of its own.
        lifetime: socket whose other end, once closed, ends the sandbox.

    Returns:
        the pid of its first process, a child of this one.

    Raises:
        OSError: the kernel does not make such namespaces, or refused a step; the process must end.
    """
    user, group = os.geteuid(), os.getegid()
    # The host's view of processes, in which this one has a number as well.
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    first = _First(lifetime, os.open("/proc/self", os.O_PATH | os.O_DIRECTORY))
    _unshare(_NAMESPACES | (os.CLONE_NEWNET if request["network"] else 0))
    os.umask(0)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _map_user(proc, (0, user), (0, group))
    # One more user namespace below this one, and none below that.
    _write("sys/user/max_user_namespaces", "1", proc)
    socket.sethostname(request["hostname"])
    if request["network"]:
        _raise_loopback()
    _move_host_away()
    _Mounts(request["mounts"], first.start).make()
    mount("", _HOST, "", _MS_REC | _MS_PRIVATE)
    detach(_HOST)
    os.chdir(ROOT)
    pivot_root(".", ".")
    detach(".")
    os.chdir("/")
    _unshare(os.CLONE_NEWUSER)
    _map_user(proc, (request["uid"], 0), (request["uid"], 0))
    first.release()
    return first.pid


def try_out(command: list[str]) -> None:
    """Raises OSError where the sandbox cannot run it; nothing is run where it is empty."""
    if not command:
        return
    try:
        pid = os.posix_spawn(command[0], command, {})
    except OSError as error:
        raise OSError(error.errno, f"execvp {command[0]}: {error.strerror}") from None
    _, status = os.waitpid(pid, 0)
    if status:
        raise OSError(errno.ENOEXEC, f"execvp {command[0]}: ended with {os.waitstatus_to_exitcode(status)}")


def _unshare(flags: int) -> None:
    try:
        os.unshare(flags)
    except OSError as error:
        raise OSError(error.errno, f"new namespaces: {error.strerror}") from None


class _First:
    """The first process of the sandbox: see `waiter.py`.

    Args:
        lifetime: becomes its standard streams.
        folder: that of this process in the host's /proc.

    Raises:
        OSError: no program can be run from memory.
    """

    def __init__(self, lifetime: int, folder: int) -> None:
        program = waiter()
        if program is None:
            raise OSError(errno.ENOEXEC, "this machine runs no program from memory")
        self._program = program
        self._lifetime, self._folder = lifetime, folder
        self._way, self._its_way = socket.socketpair()
        self.pid = 0

    def start(self) -> None:
        """Have it mount the sandbox's view of processes."""
        streams = dict.fromkeys(range(3), self._lifetime)
        places = {**streams, MAKER: self._its_way.fileno(), FOLDER: self._folder, _HIGH: self._program}
        # By way of high numbers, so that no target overwrites a source.
        high = {fd: fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, _HIGH + 1) for fd, source in places.items()}
        # Without a handler no signal from inside reaches it.
        self.pid = os.posix_spawn(
            f"{_HOST}/proc/self/fd/{high[_HIGH]}",
            ["sandbox"],
            {},
            file_actions=[(os.POSIX_SPAWN_DUP2, source, fd) for fd, source in high.items() if fd < _HIGH],
            setsid=True,
            setsigdef=(signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ),
        )
        self._its_way.close()
        for fd in high.values():
            os.close(fd)
        self._await(PROCESSES, "Can't mount proc on /proc")

    def release(self) -> None:
        """Have it follow this process into its user namespace, and wait there."""
        self._way.send(READY)
        self._await(READY, "the first process")

    def _await(self, word: bytes, what: str) -> None:
        if self._way.recv(1) != word:
            number = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            raise OSError(number, f"{what}: {os.strerror(number) if number > 0 else f'signal {-number}'}")


def _map_user(proc: int, user: tuple[int, int], group: tuple[int, int]) -> None:
    """Say who this process is in its new user namespace: numbers there, and in the one above."""
    try:
        _write("self/setgroups", "deny", proc)
        _write("self/uid_map", "{} {} 1".format(*user), proc)
        _write("self/gid_map", "{} {} 1".format(*group), proc)
    except OSError as error:
        raise OSError(error.errno, f"setting up uid map: {error.strerror}") from None


def _write(path: str, text: str, directory: int) -> None:
    fd = os.open(path, os.O_WRONLY, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = _INTERFACE.pack(b"lo", 0)
        name, flags = _INTERFACE.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _INTERFACE.pack(name, flags | _IFF_UP))


def _move_host_away() -> None:
    mount("", "/", "", _MS_REC | _MS_SLAVE)  # nothing of what follows is seen outside
    mount("tmpfs", _BASE, "tmpfs", _MS_NOSUID | _MS_NODEV)
    os.chdir(_BASE)
    for place in (_HOST, ROOT):
        os.mkdir(place[1:], 0o755)
    pivot_root(".", _HOST[1:])
    os.chdir("/")
    mount(ROOT, ROOT, "", _MS_BIND)


class _Mounts:
    """Carries out bubblewrap's options for mounts.

    Args:
        options: as bubblewrap takes them.
    """

    def __init__(self, options: Sequence[str], mount_processes: Callable[[], None]) -> None:
        self._options = iter(options)
        self._mount_processes = mount_processes
        #: Of the next file system in memory.
        self._mode = self._size = ""
        #: What lies below the next overlay.
        self._lower = ""

    def make(self) -> None:
        """Carry out all of them.

        Raises:
            OSError: the kernel refused; its text says what.
        """
        calls: Mapping[str, Callable[[], object]] = {
            "--bind": self._bind,
            "--ro-bind": self._bind_read_only,
            "--dev": self._devices,
            "--dir": self._place,
            "--overlay": self._overlay,
            "--overlay-src": self._overlay_source,
            "--perms": self._permissions,
            "--proc": self._processes,
            "--remount-ro": self._remount,
            "--size": self._limit,
            "--symlink": self._link,
            "--tmpfs": self._memory,
        }
        for option in self._options:
            calls[option]()

    def _next(self) -> str:
        return next(self._options)

    def _place(self, *, directory: bool = True) -> str:
        """The next mount point, which is made where there is none."""
        place = ROOT + self._next()
        try:
            _make(place, directory=directory)
        except OSError as error:
            raise OSError(error.errno, f"Can't mkdir {place[len(ROOT) :]}: {error.strerror}") from None
        return place

    def _source(self) -> str:
        return _resolved(self._next())

    def _bind(self, attributes: int = 0) -> None:
        source = self._source()
        place = self._place(directory=os.path.isdir(source))
        mount(source, place, "", _MS_BIND | _MS_REC)
        mount_attributes(place, attributes | _NO_SETUID | _NO_DEVICES, below=True)

    def _bind_read_only(self) -> None:
        self._bind(_READ_ONLY)

    def _remount(self) -> None:
        mount_attributes(ROOT + self._next(), _READ_ONLY)

    def _permissions(self) -> None:
        self._mode = self._next()

    def _limit(self) -> None:
        self._size = self._next()

    def _memory(self) -> None:
        settings = f"mode={self._mode or '755'}" + (f",size={self._size}" if self._size else "")
        self._mode = self._size = ""
        mount("tmpfs", self._place(), "tmpfs", _MS_NOSUID | _MS_NODEV, settings)

    def _link(self) -> None:
        aim = self._next()
        os.symlink(aim, ROOT + self._next())

    def _processes(self) -> None:
        self._place()
        self._mount_processes()

    def _devices(self) -> None:
        place = self._place()
        mount("tmpfs", place, "tmpfs", _MS_NOSUID, "mode=755")
        for name in _DEVICES:
            _make(f"{place}/{name}", directory=False)
            mount(f"{_HOST}/dev/{name}", f"{place}/{name}", "", _MS_BIND)
        mount_attributes(place, _NO_SETUID, below=True)
        for name, aim in _DEVICE_LINKS.items():
            os.symlink(aim, f"{place}/{name}")
        os.mkdir(f"{place}/shm", 0o755)
        os.mkdir(f"{place}/pts", 0o755)
        settings = "newinstance,ptmxmode=0666,mode=620"
        mount("devpts", f"{place}/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, settings)

    def _overlay_source(self) -> None:
        self._lower = self._source()

    def _overlay(self) -> None:
        parts = {"upperdir": self._source(), "workdir": self._source(), "lowerdir": self._lower}
        settings = ",".join(f"{name}={_escaped(path)}" for name, path in parts.items())
        mount("overlay", self._place(), "overlay", _MS_NOSUID | _MS_NODEV, f"{settings},userxattr")


def _escaped(path: str) -> str:
    for special in "\\,:":
        path = path.replace(special, "\\" + special)
    return path


@functools.cache
def _resolved(source: str) -> str:
    """A path, for now, of what the host has at another: whose links are the host's, and lead elsewhere here.

    It goes by a descriptor, which is held until all is mounted.
    """
    try:
        return f"{_HOST}/proc/self/fd/{open_in_root(_HOST, source)}"
    except OSError as error:
        raise OSError(
            error.errno, f"Can't find source path {source}: {os.strerror(error.errno or 0)}"
        ) from None


def _make(place: str, *, directory: bool) -> None:
    """Make a mount point, and the directories above it, where there is none."""
    try:
        if directory:
            os.mkdir(place, 0o755)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        pass
    except FileNotFoundError:
        _make(os.path.dirname(place), directory=True)
        _make(place, directory=directory)
