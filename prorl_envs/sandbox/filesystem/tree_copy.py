"""Copy of a tree that a sandbox wrote and may still write to.

No link is followed, on either side. Files are copied by reflink if the file system supports it (both share
the blocks until one changes), else by the kernel's own copy; holes stay holes. The copy preserves contents,
kinds, modes, times, hard links, and the `user.` attributes in which an overlay records deletions. Blocks.
"""

import asyncio
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.filesystem.disk_usage import DEPTH_LIMIT

#: Limit of nested directories that their owner may not read.
CLOSED_LIMIT = 64
_FICLONE = 0x40049409  # from <linux/fs.h>: _IOW(0x94, 9, int)
_CHUNK = 16 << 20
_NO_REFLINK = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS}
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

type Names = tuple[str, ...]


class CopyStopped(Exception):
    """The copy was stopped by `stop`."""


@dataclass(slots=True)
class _Copier:
    target: Path
    stop: threading.Event
    reflinks: bool = True
    links: dict[tuple[int, int], Names] = field(default_factory=dict)
    #: Created directories in order, with the mode and times to set at the end.
    made: list[tuple[Names, os.stat_result]] = field(default_factory=list)


async def copy_files(source: Path, target: Path, stop: threading.Event) -> None:
    """Copy a tree in a thread: see `copy_tree`.

    Args:
        stop: set it to stop the copy early; cancelling the caller sets it too.

    Raises:
        SandboxError: copying failed, or was stopped; the caller removes the partial copy.
    """
    copying = asyncio.create_task(asyncio.to_thread(copy_tree, source, target, stop))
    try:
        await asyncio.wait([copying])
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([copying])
        copying.exception()  # else the loop logs an exception that was never retrieved
        raise
    try:
        copying.result()
    except OSError as error:
        raise SandboxError(f"the sandbox's files cannot be copied: {error}") from error
    except CopyStopped:
        raise SandboxError("the sandbox stopped while its files were copied") from None


def copy_tree(source: Path, target: Path, stop: threading.Event) -> None:
    """Copy a tree; files that vanish meanwhile are left out.

    Args:
        source: a directory on the host whose content is untrusted.
        target: path of the copy, which is created.
        stop: set it to stop the copy early.

    Raises:
        CopyStopped: `stop` was set; `target` may be a partial copy.
        OSError: something cannot be read or written.
        SandboxError: the tree is deeper than DEPTH_LIMIT.
    """
    copier = _Copier(target, stop)
    target.mkdir(mode=0o700)
    pending: list[tuple[Names, os.stat_result]] = [((), source.lstat())]
    while pending:
        names, status = pending.pop()
        if len(names) > DEPTH_LIMIT:
            raise SandboxError(f"the sandbox has directories that are nested more than {DEPTH_LIMIT} deep")
        try:
            with _opened(source, names) as read, _opened(target, names) as write:
                copier.made.append((names, status))
                pending += _copy_directory(copier, names, read, write)
        except FileNotFoundError:
            if not names:  # the tree itself
                raise
    for names, status in reversed(copier.made):
        with _opened(target, names) as fd:
            _finish(fd, status)


def _copy_directory(
    copier: _Copier, names: Names, source: int, target: int
) -> list[tuple[Names, os.stat_result]]:
    """Copy the files of one directory; return its subdirectories, which are created but still empty."""
    _copy_attributes(source, target)
    directories = []
    with os.scandir(source) as entries:
        for entry in entries:
            if copier.stop.is_set():
                raise CopyStopped
            try:
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    os.mkdir(entry.name, 0o700, dir_fd=target)
                    directories.append(((*names, entry.name), found))
                else:
                    _copy_entry(copier, (*names, entry.name), found, source, target)
            except FileNotFoundError:
                continue
    return directories


def _copy_entry(copier: _Copier, names: Names, found: os.stat_result, source: int, target: int) -> None:
    name = names[-1]
    if found.st_nlink > 1 and (first := copier.links.get((found.st_dev, found.st_ino))):
        with _opened(copier.target, first[:-1]) as fd:
            os.link(first[-1], name, src_dir_fd=fd, dst_dir_fd=target, follow_symlinks=False)
        return
    if stat.S_ISLNK(found.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    elif stat.S_ISREG(found.st_mode):
        _copy_file(copier, name, found, source, target)
    else:
        # Sockets, pipes, and the device 0:0 that marks a deleted file in an overlay.
        os.mknod(name, stat.S_IFMT(found.st_mode) | 0o600, os.makedev(0, 0), dir_fd=target)
    if found.st_nlink > 1:
        copier.links[found.st_dev, found.st_ino] = names


def _copy_file(copier: _Copier, name: str, found: os.stat_result, source: int, target: int) -> None:
    with ExitStack() as cleanup:
        read = _open_file(name, source, cleanup)
        status = os.fstat(read)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "replaced meanwhile", name)
        write = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
        cleanup.callback(os.close, write)
        if not (copier.reflinks and _cloned(copier, read, write)):
            _copy_content(copier, read, write, status.st_size)
        _copy_attributes(read, write)
        _finish(write, found)


def _cloned(copier: _Copier, read: int, write: int) -> bool:
    try:
        fcntl.ioctl(write, _FICLONE, read)
    except OSError as error:
        if error.errno not in _NO_REFLINK:
            raise
        copier.reflinks = False
        return False
    return True


def _copy_content(copier: _Copier, read: int, write: int, size: int) -> None:
    """Copy the data up to `size`, the size of the file when it was opened: it may grow meanwhile."""
    os.ftruncate(write, size)
    offset = 0
    while offset < size:
        try:
            start = os.lseek(read, offset, os.SEEK_DATA)
            end = min(os.lseek(read, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole up to the end
                return
            raise
        while start < end:
            if copier.stop.is_set():
                raise CopyStopped
            copied = _copy_range(read, write, min(end - start, _CHUNK), start)
            if not copied:  # truncated meanwhile
                return
            start += copied
        offset = max(start, end)


def _copy_range(read: int, write: int, size: int, start: int) -> int:
    """Copy bytes to the same offset; return their number."""
    try:
        return os.copy_file_range(read, write, size, start, start)
    except OSError as error:
        if error.errno != errno.EXDEV:  # since Linux 5.19, between file systems of one kind only
            raise
    os.lseek(write, start, os.SEEK_SET)
    return os.sendfile(write, read, start, size)


def _copy_attributes(read: int, write: int) -> None:
    for name in os.listxattr(read):
        if name.startswith("user."):
            os.setxattr(write, name, os.getxattr(read, name))


def _finish(fd: int, status: os.stat_result) -> None:
    os.fchmod(fd, stat.S_IMODE(status.st_mode))
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


@contextmanager
def _opened(root: Path, names: Names) -> Iterator[int]:
    """Open the directory at `names` below `root`, passing through directories only.

    Directories that their owner may not read, including those on the path, are made readable meanwhile.
    """
    with ExitStack() as cleanup:
        closed: list[int] = []
        fd = _open_directory(str(root), None, cleanup, closed)
        try:
            for name in names:
                below = _open_directory(name, fd, cleanup, closed)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)


def _open_directory(name: str, dir_fd: int | None, cleanup: ExitStack, closed: list[int]) -> int:
    """Open a directory; if its owner may not read it, make it readable meanwhile and add it to `closed`."""
    if len(closed) > CLOSED_LIMIT:  # each takes one of the service's descriptors
        raise SandboxError(f"more than {CLOSED_LIMIT} nested directories deny their owner access")
    with ExitStack() as opened:
        handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        opened.callback(os.close, handle)
        if _grant(handle, 0o500, opened):
            cleanup.push(opened.pop_all())
            closed.append(handle)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _open_file(name: str, dir_fd: int, cleanup: ExitStack) -> int:
    """Open a file for reading; anything may have replaced it meanwhile."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=dir_fd)
    except PermissionError:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        cleanup.callback(os.close, handle)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise FileNotFoundError(errno.ENOENT, "replaced meanwhile", name) from None
        _grant(handle, 0o400, cleanup)
        fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    cleanup.callback(os.close, fd)
    return fd


def _grant(fd: int, needed: int, cleanup: ExitStack) -> bool:
    """Grant the owner missing rights until `cleanup` closes. Return True if any were missing."""
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & needed == needed:
        return False
    handle = Path(f"/proc/self/fd/{fd}")
    handle.chmod(mode | needed)
    cleanup.callback(handle.chmod, mode)
    return True
