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
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl_envs.sandbox.files import clear, make_accessible, remove_tree

#: Sandboxes' directories that wait to be used again.
_LIMIT = 256
#: Bytes of a directory that is empty and never held much. Some file systems never shrink one.
_EMPTY_SIZE = 4096
#: FS_IOC_GETFLAGS and FS_IOC_FSGETXATTR of <linux/fs.h>, the bytes that each gives, and those of them that
#: are no setting (how many extents there are).
_SETTINGS = ((0x80086601, 8, slice(0)), (0x801C581F, 28, slice(8, 12)))


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


def _emptied(root: Path, keep: Collection[str]) -> bool:
    """Remove what is below a directory, but for those kept. Returns whether these are as if just made."""
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        kept = clear(top, but=keep)
        return all(_as_new(name, top) for name in kept)
    finally:
        os.close(top)


def _as_new(name: str, top: int) -> bool:
    make_accessible(name, top)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        clear(fd)
        os.fchmod(fd, 0o700)
        os.utime(fd)
        # No sandbox ever saw the directory above.
        return os.fstat(fd).st_size <= _EMPTY_SIZE and _given(fd) == _given(top)
    finally:
        os.close(fd)


def _given(fd: int) -> object:
    """What a directory can be given besides mode and times: owners, attributes, access lists, flags."""
    status = os.fstat(fd)
    return status.st_uid, status.st_gid, _attributes(fd), [_setting(fd, *each) for each in _SETTINGS]


def _attributes(fd: int) -> dict[str, bytes]:
    with _nothing_where_there_is_none():
        return {name: os.getxattr(fd, name) for name in os.listxattr(fd)}
    return {}


def _setting(fd: int, request: int, size: int, no_setting: slice) -> bytes:
    with _nothing_where_there_is_none():
        setting = bytearray(fcntl.ioctl(fd, request, bytes(size)))
        del setting[no_setting]
        return bytes(setting)
    return b""


@contextmanager
def _nothing_where_there_is_none() -> Iterator[None]:
    """Of a kind of setting that a file system does not know."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EOPNOTSUPP):
            raise
