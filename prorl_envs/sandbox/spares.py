"""Directories of ended sandboxes, emptied for the next ones.

Making a directory and removing it takes tens of microseconds; and a millisecond and more on ext4 without a
journal, whose search for a free inode passes all those that were given up in the last minutes. What an ended
sandbox gave its directories, and emptying does not take back, must not reach the next one: then they are
removed.
"""

import errno
import fcntl
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl_envs.sandbox.files import clear, make_accessible, remove_tree

#: Sandboxes' directories that wait to be used again.
_LIMIT = 256
#: Bytes of a directory that is empty and never held much. Some file systems never shrink one.
_EMPTY_SIZE = 4096
#: FS_IOC_GETFLAGS and FS_IOC_FSGETXATTR of <linux/fs.h>.
_GET_FLAGS, _GET_EXTENDED = 0x80086601, 0x801C581F


class Spares:
    """The directories below a driver's that wait for a sandbox.

    Args:
        base: the driver's.
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
            except FileNotFoundError:  # somebody tidies up here
                continue
        else:
            root.mkdir(mode=0o700)
        for directory in below:
            directory.mkdir(mode=0o700, exist_ok=True)

    def take_back(self, root: Path, keep: Collection[str]) -> bool:
        """As `retire`, where that takes a few system calls: there is nothing but what is kept, and nothing in
        that. Else False, and all is still there.

        Args: as of `retire`.
        """
        if len(self._spares) >= _LIMIT:
            return False
        try:
            if not _untouched(root, keep):
                return False
            spare = self._base / next(self._names)
            root.rename(spare)
        except OSError:  # `retire` finds out what is the matter
            return False
        self._spares.append(spare)
        return True

    def retire(self, root: Path, keep: Collection[str]) -> None:
        """Empty the directory of a sandbox in which nothing runs any more, for another; or remove it.

        Blocks; any thread may call it. Missing is fine.

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
    """Whether there is nothing but empty directories that are kept, as if just made."""
    with _opened(root) as top:
        with os.scandir(top) as entries:
            names = [entry.name for entry in entries]
        given = _given(top)
        return all(name in keep and _is_empty(name, top, given) for name in names)


def _is_empty(name: str, top: int, given: object) -> bool:
    with _opened(name, top) as fd:
        if os.fstat(fd).st_size > _EMPTY_SIZE:  # even to find it empty may take long
            return False
        with os.scandir(fd) as entries:
            if next(entries, None) is not None:
                return False
        return _as_new(fd, given)


def _emptied(root: Path, keep: Collection[str]) -> bool:
    """Remove what is below a directory, but for those kept. Returns whether these are as if just made."""
    with _opened(root) as top:
        kept = clear(top, but=keep)
        given = _given(top)  # no sandbox ever saw it
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
    """Give an empty directory the mode and times of a new one; whether it then is like one.

    Args:
        given: what a new one has, of `_given`.
    """
    os.fchmod(fd, 0o700)
    os.utime(fd)
    return os.fstat(fd).st_size <= _EMPTY_SIZE and _given(fd) == given


def _given(fd: int) -> object:
    """What a directory can be given besides mode and times: owners, attributes, access lists, flags."""
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
    return flags[:8] + flags[12:]  # without how many extents there are


def _known[T](read: Callable[[int], T], fd: int) -> T | None:
    """What `read` gives; None of a kind of setting that the file system does not know."""
    try:
        return read(fd)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP):
            return None
        raise
