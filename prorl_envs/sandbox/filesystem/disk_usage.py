"""Disk use of a tree that a sandbox writes. Run in a child of a template process: see `measure`.

The tree is untrusted and changes meanwhile. No link is followed, every directory is opened from its parent's
descriptor, and everything that can grow is bounded.
"""

import contextlib
import os
import signal
import stat
from collections.abc import Generator
from dataclasses import dataclass

from prorl_envs.sandbox.linux.syscall_wrappers import PR_SET_PDEATHSIG, prctl

#: Limit of nested directories; a deeper tree is not counted to its end.
DEPTH_LIMIT = 200


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Size of a tree: bytes on disk, and number of files and directories. They are incomplete if the tree is
    deeper than `DEPTH_LIMIT`."""

    size: int
    files: int
    too_deep: bool = False

    def __add__(self, other: "DiskUse") -> "DiskUse":
        return DiskUse(self.size + other.size, self.files + other.files, self.too_deep or other.too_deep)


def measure(root: int, pidfd: int | None, *, size: int, files: int) -> DiskUse:
    """Enter the user namespace of a sandbox and measure its tree.

    The sandbox's user owns the files and can lock the host's own user out of directories. In the user
    namespace, this process may still read them.

    Args:
        root: descriptor of the tree's directory.
        pidfd: the sandbox's first process; None if the sandbox has no user namespace of its own.
        size, files: bounds at which to stop: a larger tree is too large in any case.

    Raises:
        OSError: the sandbox has stopped.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if pidfd is not None:
        os.setns(pidfd, os.CLONE_NEWUSER)
    return walk(root, size=size, files=files)


def walk(root: int, *, size: int, files: int) -> DiskUse:
    """Add up everything below `root`, until one of the two bounds is passed.

    Files with several names count once, sparse files with their allocated blocks.
    """
    total = count = 0
    linked: set[tuple[int, int]] = set()
    open_directories = [_Entered(os.dup(root))]
    try:
        while open_directories and total <= size and count <= files:
            directory = open_directories[-1]
            name = next(directory.names, None)
            if name is None:
                open_directories.pop().leave()
                continue
            count += 1
            try:
                status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
            except OSError:  # removed meanwhile
                continue
            if stat.S_ISDIR(status.st_mode):
                if len(open_directories) > DEPTH_LIMIT:
                    return DiskUse(total, count, too_deep=True)
                child = _enter(name, directory.fd)
                if child is not None:
                    open_directories.append(child)
            elif status.st_nlink > 1:
                if (status.st_dev, status.st_ino) in linked:
                    continue
                linked.add((status.st_dev, status.st_ino))
            total += status.st_blocks * 512
    finally:
        for entered in open_directories:
            entered.leave()
    return DiskUse(total, count)


class _Entered:
    """A directory that is being read."""

    def __init__(self, fd: int, closed: tuple[int, int] | None = None) -> None:
        self.fd = fd
        self.names = _names(fd)
        self._closed = closed  # its descriptor and former mode, if the mode was changed to open it

    def leave(self) -> None:
        self.names.close()
        os.close(self.fd)
        if self._closed is not None:
            _restore_mode(*self._closed)


def _enter(name: str, parent: int) -> _Entered | None:
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return _Entered(os.open(name, os.O_RDONLY | flags, dir_fd=parent))
    except PermissionError:
        with contextlib.suppress(OSError):
            return _enter_closed(os.open(name, os.O_PATH | flags, dir_fd=parent))
    except OSError:  # removed, or replaced by something else
        pass
    return None


def _enter_closed(handle: int) -> _Entered:
    """Enter a directory that its owner may not read (this user, if the sandbox has no user of its own).

    Its mode stays changed until `leave`: otherwise nothing in it can be inspected.
    """
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    try:
        os.chmod(_path(handle), mode | 0o500)  # noqa: PTH101 - the template imports no pathlib
        return _Entered(os.open(_path(handle), os.O_RDONLY | os.O_DIRECTORY), (handle, mode))
    except OSError:
        _restore_mode(handle, mode)
        raise


def _restore_mode(handle: int, mode: int) -> None:
    with contextlib.suppress(OSError):
        os.chmod(_path(handle), mode)  # noqa: PTH101
    os.close(handle)


def _path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def _names(fd: int) -> Generator[str, None, None]:
    # A generator, because a directory can have more entries than fit in memory as a list of names.
    with os.scandir(fd) as entries:
        for entry in entries:
            yield entry.name
