"""Mounts of a sandbox, as system calls: the steps that bubblewrap takes for its options, in its order."""

# ruff: noqa: PTH112

import errno
import os
import signal
import stat
import struct
from collections.abc import Callable, Iterable, Mapping

from prorl_envs.sandbox.launcher.elf import ANY, Stack
from prorl_envs.sandbox.launcher.writer import HERE, OWN, Writer
from prorl_envs.sandbox.linux.kernel_settings import TERMINALS, terminals_settings

#: Root of the sandbox and root of the host during the launch, and the initial directory.
ROOT, HOST, _BASE = "/root", "/host", "/tmp"
#: Socket pair between the launcher and the first process, created before the mounts.
TO_FIRST, TO_MAKER = OWN + 3, OWN + 4
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "fd": "/proc/self/fd",
    "core": "/proc/kcore",
    "ptmx": "pts/ptmx",
}

# Constants of the kernel.
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
_MS_BIND, MS_REC, MS_PRIVATE, _MS_SLAVE = 1 << 12, 1 << 14, 1 << 18, 1 << 19
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _BELOW = 1, 2, 4, 0x8000  # mount_setattr's
_IN_ROOT = 0x10
CLONE_PIDFD = 0x1000


class Mounts:
    """Translator of bubblewrap's mount options to system calls.

    Args:
        options: bubblewrap's options; paths that start with `own` are in the sandbox's directory.
        own: prefix of those paths.
    """

    def __init__(self, writer: Writer, options: Iterable[str], own: str) -> None:
        self._writer, self._own = writer, own
        self._options = iter(options)
        #: Options of the next file system in memory.
        self._mode = self._size = ""
        #: Lower directories of the next overlay, the lowest first.
        self._lower: list[str] = []
        #: Temporary paths of the opened paths, by path on the host: see `_source`.
        self._sources: dict[str, str] = {}
        #: Paths that exist inside.
        self._made: set[str] = set()
        #: Descriptor of the first process.
        self._first = -1

    def make(self) -> int:
        """Write all mounts and the start of the first process; return its descriptor."""
        self._move_host_away()
        calls: Mapping[str, Callable[[], object]] = {
            "--bind": self._bind,
            "--ro-bind": lambda: self._bind(_READ_ONLY),
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
        assert self._first >= 0, "there is no sandbox without /proc"
        return self._first

    def _mount(self, source: str, place: str, kind: str, flags: int, settings: str = "") -> None:
        what = f"{kind or 'mount'} at {place.removeprefix(ROOT)}"
        self._writer.call("mount", source, place, kind, flags, settings, what=what)
        self._made = {path for path in self._made if not path.startswith(place.rstrip("/") + "/")}

    def _attributes(self, place: str, attributes: int, *, below: bool = False) -> None:
        change = struct.pack("=4Q", attributes, 0, 0, 0)
        flags, what = _BELOW if below else 0, f"attributes of the mount at {place.removeprefix(ROOT)}"
        self._writer.call("mount_setattr", HERE, place, flags, change, len(change), what=what)

    def _move_host_away(self) -> None:
        call = self._writer.call
        self._mount("", "/", "", MS_REC | _MS_SLAVE)  # the host does not see the following mounts
        self._mount("tmpfs", _BASE, "tmpfs", MS_NOSUID | MS_NODEV)
        call("chdir", _BASE)
        for place in (HOST, ROOT):
            call("mkdirat", HERE, place[1:], 0o755)
        call("pivot_root", ".", HOST[1:], what="pivot_root")
        call("chdir", "/")
        self._mount(ROOT, ROOT, "", _MS_BIND)

    def _next(self) -> str:
        return next(self._options)

    def _place(self, *, directory: bool = True) -> str:
        """Return the next mount point, which is created if missing."""
        path = self._next()
        self._make(ROOT + path, directory=directory, what=f"Can't mkdir {path}")
        return ROOT + path

    def _make(self, place: str, *, directory: bool, what: str) -> None:
        if place in self._made or place == ROOT or place == ROOT + "/":
            return
        above = [place[:end] for end in range(len(ROOT) + 1, len(place)) if place[end] == "/"]
        for path in above:
            if path not in self._made:
                self._writer.call("mkdirat", HERE, path, 0o755, least=ANY)
        if directory:
            self._writer.call("mkdirat", HERE, place, 0o755, but=errno.EEXIST, what=what)
        else:
            self._writer.call("mknodat", HERE, place, stat.S_IFREG | 0o644, 0, but=errno.EEXIST, what=what)
        self._made.update(above, [place])

    def _source(self, path: str) -> str:
        """Return a temporary path to a path on the host, whose links would lead elsewhere in this root.

        The temporary path uses a descriptor, which stays open until all mounts are done.
        """
        if path not in self._sources:
            what = f"Can't find source path {path}"
            writer, flags = self._writer, os.O_PATH | os.O_CLOEXEC
            if path.startswith(self._own):
                fd = writer.openat(OWN, path[len(self._own) :], os.O_PATH | os.O_NOFOLLOW, what)
            else:
                root = writer.openat(HERE, HOST, os.O_PATH | os.O_DIRECTORY)
                how = struct.pack("=3Q", flags, 0, _IN_ROOT)
                writer.call("openat2", root, path, how, len(how), what=what)
                fd = writer.fresh()
                writer.close(root)
            self._sources[path] = f"{HOST}/proc/self/fd/{fd}"
        return self._sources[path]

    def _bind(self, attributes: int = 0) -> None:
        path = self._next()
        source = self._source(path)
        place = self._place(directory=os.path.isdir(path))
        self._mount(source, place, "", _MS_BIND | MS_REC)
        self._attributes(place, attributes | _NO_SETUID | _NO_DEVICES, below=True)

    def _remount(self) -> None:
        self._attributes(ROOT + self._next(), _READ_ONLY)

    def _permissions(self) -> None:
        self._mode = self._next()

    def _limit(self) -> None:
        self._size = self._next()

    def _memory(self) -> None:
        settings = f"mode={self._mode or '755'}" + (f",size={self._size}" if self._size else "")
        self._mode = self._size = ""
        self._mount("tmpfs", self._place(), "tmpfs", MS_NOSUID | MS_NODEV, settings)

    def _link(self) -> None:
        aim, place = self._next(), self._next()
        self._writer.call("symlinkat", aim, HERE, ROOT + place, what=f"Can't create {place}")

    def _processes(self) -> None:
        self._place()
        writer = self._writer
        # The child has no copy of the host process's memory, only of this program's.
        writer.call("clone", CLONE_PIDFD | signal.SIGCHLD, 0, Stack(), what="the first process")
        writer.jump("first", if_none=True)
        self._first = writer.fresh()
        writer.close(TO_MAKER)
        writer.call("read", TO_FIRST, Stack(), 1, least=1, what="the first process")

    def _devices(self) -> None:
        place, call = self._place(), self._writer.call
        self._mount("tmpfs", place, "tmpfs", MS_NOSUID, "mode=755")
        for name in _DEVICES:
            self._make(f"{place}/{name}", directory=False, what=f"Can't create {name}")
            self._mount(f"{HOST}/dev/{name}", f"{place}/{name}", "", _MS_BIND)
        for name, aim in _DEVICE_LINKS.items():
            call("symlinkat", aim, HERE, f"{place}/{name}")
        for name in ("shm", "pts"):
            self._make(f"{place}/{name}", directory=True, what=f"Can't mkdir {name}")
        # Read-only: otherwise the owner of a device could change the mode and the times of the host's.
        # Writing to the device itself does not change the file system.
        self._attributes(place, _NO_SETUID | _READ_ONLY, below=True)
        settings = terminals_settings(TERMINALS)
        self._mount("devpts", f"{place}/pts", "devpts", MS_NOSUID | MS_NOEXEC, settings)

    def _overlay_source(self) -> None:
        self._lower.append(self._source(self._next()))

    def _overlay(self) -> None:
        # Such paths contain no characters that need escaping.
        upper, work = self._source(self._next()), self._source(self._next())
        lower = ":".join(reversed(self._lower))
        self._lower = []
        settings = f"upperdir={upper},workdir={work},lowerdir={lower},userxattr"
        self._mount("overlay", self._place(), "overlay", MS_NOSUID | MS_NODEV, settings)
