"""Pool of directories of closed sandboxes, emptied for the next ones.

Making and removing a directory takes tens of microseconds, but a millisecond and more on ext4 without a
journal, whose search for a free inode passes all inodes freed in the last minutes. Settings that a closed
sandbox made on its directories must not reach the next sandbox: if emptying does not undo them, the
directories are removed.
"""

import errno
import fcntl
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl_envs.sandbox.filesystem.directories import clear, make_accessible, remove_tree

#: Most directories in the pool.
_LIMIT = 256
#: Size in bytes of an empty directory that never held much. Some file systems never shrink a directory.
_EMPTY_SIZE = 4096
#: FS_IOC_GETFLAGS and FS_IOC_FSGETXATTR of <linux/fs.h>.
_GET_FLAGS, _GET_EXTENDED = 0x80086601, 0x801C581F


class DirectoryPool:
    """Emptied sandbox directories, below a driver's directory, ready for reuse.

    Args:
        base: the driver's directory.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._names = map("spare{}".format, itertools.count())
        self._spares: list[Path] = []

    def make(self, root: Path, below: Iterable[Path]) -> None:
        """Make the directory of a sandbox, and empty ones below it.

        Raises:
            OSError: one cannot be made.
        """
        while self._spares:
            try:
                self._spares.pop().rename(root)
                break
            except FileNotFoundError:  # removed by a cleanup of the disk
                continue
        else:
            root.mkdir(mode=0o700)
        for directory in below:
            directory.mkdir(mode=0o700, exist_ok=True)

    def take_back(self, root: Path, keep: Collection[str]) -> bool:
        """Recycle as `retire` does, if that takes only a few system calls: if `root` holds only directories
        to keep, all empty. Otherwise return False and keep all files.

        Args: as of `retire`.
        """
        if len(self._spares) >= _LIMIT:
            return False
        try:
            if not _untouched(root, keep):
                return False
            spare = self._base / next(self._names)
            root.rename(spare)
        except OSError:  # `retire` will report the cause
            return False
        self._spares.append(spare)
        return True

    def retire(self, root: Path, keep: Collection[str]) -> None:
        """Empty the directory of a sandbox in which nothing runs any more, for another; or remove it.

        Blocks; any thread may call it. A missing directory is no error.

        Args:
            keep: the names below it of directories that another sandbox may get.

        Raises:
            OSError: something cannot be removed.
        """
        if len(self._spares) < _LIMIT:
            spare = self._base / next(self._names)
            try:
                root.rename(spare)
            except FileNotFoundError:
                return
            root = spare
            if _emptied(root, keep):
                self._spares.append(root)
                return
        remove_tree(root)


def _untouched(root: Path, keep: Collection[str]) -> bool:
    """Return True if there are only empty directories to keep, and these are like new ones."""
    with _opened(root) as top:
        with os.scandir(top) as entries:
            names = [entry.name for entry in entries]
        given = _given(top)
        return all(name in keep and _is_empty(name, top, given) for name in names)


def _is_empty(name: str, top: int, given: object) -> bool:
    with _opened(name, top) as fd:
        if os.fstat(fd).st_size > _EMPTY_SIZE:  # the scan of an empty but large directory may take long
            return False
        with os.scandir(fd) as entries:
            if next(entries, None) is not None:
                return False
        return _as_new(fd, given)


def _emptied(root: Path, keep: Collection[str]) -> bool:
    """Remove a directory's content except for kept directories. Return True if these are like new ones."""
    with _opened(root) as top:
        kept = clear(top, but=keep)
        given = _given(top)  # no sandbox ever had access to it
        return all(_cleared(name, top, given) for name in kept)


def _cleared(name: str, top: int, given: object) -> bool:
    make_accessible(name, top)
    with _opened(name, top) as fd:
        clear(fd)
        return _as_new(fd, given)


@contextmanager
def _opened(path: Path | str, dir_fd: int | None = None) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _as_new(fd: int, given: object) -> bool:
    """Reset an empty directory to the mode and times of a new one. Return True if it then is like a new one.

    Args:
        given: a new directory's settings, of `_given`.
    """
    os.fchmod(fd, 0o700)
    os.utime(fd)
    return os.fstat(fd).st_size <= _EMPTY_SIZE and _given(fd) == given


def _given(fd: int) -> object:
    """Return a directory's settings besides mode and times: owners, attributes, access lists, flags."""
    status = os.fstat(fd)
    return (
        status.st_uid,
        status.st_gid,
        _known(_attributes, fd),
        _known(_flags, fd),
        _known(_extended_flags, fd),
    )


def _attributes(fd: int) -> dict[str, bytes]:
    return {name: os.getxattr(fd, name) for name in os.listxattr(fd)}


def _flags(fd: int) -> bytes:
    return fcntl.ioctl(fd, _GET_FLAGS, bytes(8))


def _extended_flags(fd: int) -> bytes:
    flags = fcntl.ioctl(fd, _GET_EXTENDED, bytes(28))
    return flags[:8] + flags[12:]  # without the number of extents


def _known[T](read: Callable[[int], T], fd: int) -> T | None:
    """Return the result of `read`; None if the file system does not know that kind of setting."""
    try:
        return read(fd)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP):
            return None
        raise
