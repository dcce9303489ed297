"""Makes a sandbox by the kernel's own calls, from the options that bubblewrap would get.

Runs in the starter (`zygote.py`): a child is cloned straight into new namespaces, mounts what the options ask
for, gives up its capabilities and becomes the sandbox's first process. It knows nothing of the host side.

What bubblewrap does is done, in its order. The host's root is moved away first, so that no link in an image
leads there. Mounts belong to a user namespace above the one that the sandbox's processes are in, below which
there can be no other. See mount_namespaces(7), user_namespaces(7), pivot_root(2), and mount_setattr(2), which
needs Linux 5.12.
"""

# The starter imports no pathlib, which each of its forks would pay for.
# ruff: noqa: PTH102, PTH112, PTH120, PTH211

import contextlib
import fcntl
import functools
import os
import signal
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prorl_envs.sandbox.syscalls import (
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    clone,
    detach,
    keep_capability,
    mount,
    mount_attributes,
    open_in_root,
    pivot_root,
    prctl,
)
from prorl_envs.sandbox.waiter import waiter

READY = b"ready\n"
#: The capability that the first process keeps. It is without power in a user namespace, and makes the process
#: more privileged than all others inside, so that none can trace it and take its lifetime socket.
_CAP_SYS_PACCT = 20

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

#: The descriptor of what the first process becomes.
_PROGRAM = 3
#: Where the host's root, and the sandbox's to be, are meanwhile; and a directory to begin with.
_HOST, _ROOT, _BASE = "/host", "/root", "/tmp"
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


def clone_first(request: Mapping[str, Any], streams: int) -> int:
    """Start the first process of a new sandbox. For a single-threaded process.

    Args:
        request: `mounts` are bubblewrap's options for them; `uid` is the user and group inside; `hostname`;
            `network`, whether the sandbox gets one of its own; `command`, what the first process becomes
            where it cannot become the `waiter`, or `tries_command` says that it is to show it can be run.
        streams: descriptor that becomes its standard streams. It says READY there, or why it could not start,
            and ends when that is closed on the other side.

    Returns:
        its pid.

    Raises:
        OSError: the kernel does not make such namespaces.
    """
    user, group = os.geteuid(), os.getegid()
    program = None if request["tries_command"] else waiter()
    pid = clone(_NAMESPACES | (os.CLONE_NEWNET if request["network"] else 0))
    if pid == 0:
        try:
            _keep(streams, program)
            _enclose(request, user, group)
            _become_first(None if program is None else _PROGRAM, request["command"])
        except BaseException as error:  # noqa: BLE001 - said where the host reads it
            os.write(2, str(getattr(error, "strerror", None) or repr(error)).encode(errors="replace"))
        finally:
            os._exit(1)
    return pid


def _keep(streams: int, program: int | None) -> None:
    """Let go of every descriptor but these."""
    for fd in range(3):
        os.dup2(streams, fd)
    if program is not None:
        os.dup2(program, _PROGRAM, inheritable=False)
    _close_after(program)


def _close_after(program: int | None) -> None:
    os.closerange(_PROGRAM + (program is not None), os.sysconf("SC_OPEN_MAX"))


def _become_first(program: int | None, command: list[str]) -> None:
    _close_after(program)  # by which sources of mounts were found
    os.setsid()
    os.umask(0o022)
    # Without a handler no signal from inside reaches a first process; orphans are reaped by the kernel.
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if program is not None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        prctl(PR_SET_DUMPABLE, 1)  # or the host's ordinary user could not reach it by its files in /proc
        os.write(1, READY)
        with contextlib.suppress(OSError):
            os.execve(program, ["sandbox"], {})
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        os.execve(command[0], command, {})
    except OSError as error:
        raise OSError(error.errno, f"execvp {command[0]}: {error.strerror}") from None


def _enclose(request: Mapping[str, Any], user: int, group: int) -> None:
    # The host's view of processes, in which this one has a number as well.
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    os.umask(0)
    _map_user(proc, (0, user), (0, group))
    # One more user namespace below this one, and none below that.
    _write("sys/user/max_user_namespaces", "1", proc)
    socket.sethostname(request["hostname"])
    if request["network"]:
        _raise_loopback()
    _move_host_away()
    _Mounts(request["mounts"]).make()
    mount("", _HOST, "", _MS_REC | _MS_PRIVATE)
    detach(_HOST)
    os.chdir(_ROOT)
    pivot_root(".", ".")
    detach(".")
    os.chdir("/")
    os.unshare(os.CLONE_NEWUSER)
    _map_user(proc, (request["uid"], 0), (request["uid"], 0))
    os.close(proc)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    keep_capability(_CAP_SYS_PACCT)


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
    for place in (_HOST, _ROOT):
        os.mkdir(place[1:], 0o755)
    pivot_root(".", _HOST[1:])
    os.chdir("/")
    mount(_ROOT, _ROOT, "", _MS_BIND)


class _Mounts:
    """Carries out bubblewrap's options for mounts.

    Args:
        options: as bubblewrap takes them.
    """

    def __init__(self, options: Sequence[str]) -> None:
        self._options = iter(options)
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
        place = _ROOT + self._next()
        try:
            _make(place, directory=directory)
        except OSError as error:
            raise OSError(error.errno, f"Can't mkdir {place[len(_ROOT) :]}: {error.strerror}") from None
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
        mount_attributes(_ROOT + self._next(), _READ_ONLY)

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
        os.symlink(aim, _ROOT + self._next())

    def _processes(self) -> None:
        mount("proc", self._place(), "proc", _MS_NOSUID | _MS_NOEXEC | _MS_NODEV)

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
