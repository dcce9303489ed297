"""Unpacking of untrusted archives into files and trees.

The archive is GNU tar, read and written with Python's `tarfile`. The extraction of `tarfile` is not used: its
`data` filter checks paths by name before they are opened, and links can mislead it (CVE-2025-4517 and related
ones, fixed in 3.12.11). Here every directory is opened from its parent, without following a link.
"""

import contextlib
import os
import tarfile
from collections.abc import Callable, Iterator
from typing import IO, Any, Self

from prorl_envs.errors import TransferRefused
from prorl_envs.tools.protocol.tree import (
    FOLDER,
    LATEST,
    NAMES_LIMIT,
    PATH_LIMIT,
    TOP,
    Transferred,
    TreeLimits,
    is_utf8,
    stays_inside,
)

_COPY_SIZE = 256 * 1024
_LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_SUPPORTED = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE)


class _Header(tarfile.TarInfo):
    """Header of a member. Refuses headers that `pack` never writes, before tarfile acts on them."""

    checked = False

    def _proc_member(self, archive: tarfile.TarFile) -> Self:
        # tarfile reads a long name completely into memory, and extended headers may need even more memory.
        if self.type in _LONG and not 0 <= self.size <= PATH_LIMIT + 1:
            raise TransferRefused("the archive holds a name that is too long")
        if self.type not in (*_LONG, *_SUPPORTED):
            raise TransferRefused(f"the archive holds a member of type {self.type!r}")
        if self.size < 0:
            raise TransferRefused("the archive holds a negative size")
        self.checked = True
        member: Self = super()._proc_member(archive)  # type: ignore[misc]
        return member


def unpack(archive: Any, folder: int, name: str, limits: TreeLimits, *, merge: bool) -> Transferred:
    """Create a file or tree from an untrusted archive.

    Args:
        archive: object with the method `read(size)`.
        folder: descriptor of the parent directory; it stays open.
        name: name of the file or tree in the parent directory.
        merge: allow an existing tree. Its directories are reused; its files and links are replaced, each
            atomically.

    Raises:
        TransferRefused: the archive holds a member that `pack` never writes, or is too large.
        OSError: an entry cannot be written.
    """
    unpacker = _Unpacker(folder, name, limits, merge)
    try:
        with tarfile.open(
            fileobj=archive, mode="r|", tarinfo=_Header, encoding="utf-8", errors="surrogateescape"
        ) as opened:
            while (info := opened.next()) is not None:
                opened.members.clear()  # type: ignore[attr-defined]
                assert isinstance(info, _Header)
                if not info.checked:  # tarfile does not call `_proc_member` in this version
                    raise TransferRefused("this Python's tarfile does not let headers be checked")
                unpacker.entry(opened, info)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise TransferRefused(f"not an archive: {error}") from error
    unpacker.finish()
    return unpacker.done


class _Unpacker:
    def __init__(self, folder: int, name: str, limits: TreeLimits, merge: bool) -> None:
        self._root = folder
        self._name = name
        self._limits = limits
        self._merge = merge
        #: Paths as text, because split paths would need many times the memory.
        self._seen: set[str] = set()
        self._names_size = 0
        #: Directories of the tree; for each created directory, its final mode and time.
        self._folders: dict[str, tuple[int, int] | None] = {"": None}
        self.done = Transferred()

    def entry(self, archive: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        place = self._place(info)
        self.done.add(info.size if info.isreg() else 0, self._limits)
        with self._opened(place[:-1]) as folder:
            if info.isdir():
                self._make_folder(folder, place, info)
            elif info.issym():
                if not stays_inside(place, info.linkname) or not is_utf8(info.linkname):
                    raise TransferRefused(f"{info.name[:PATH_LIMIT]} is a link that leads out of the tree")
                self._replace(folder, place, lambda name: os.symlink(info.linkname, name, dir_fd=folder))
            else:
                content = archive.extractfile(info)
                assert content is not None
                self._replace(folder, place, lambda name: _write(folder, name, content, info))

    def finish(self) -> None:
        """Set permissions and times of directories. This comes last, since writes need and change them."""
        for path, last in reversed(self._folders.items()):
            if last is not None:
                mode, time = last
                with self._opened(tuple(path.split("/"))) as folder:
                    os.fchmod(folder, mode | 0o700)
                    os.utime(folder, (time, time))

    def _place(self, info: tarfile.TarInfo) -> tuple[str, ...]:
        """Return the parts of a member's path. Each member must follow its directory, and occur once."""
        place = tuple(info.name.split("/"))
        good = place[0] == TOP and not {"", ".", ".."} & set(place) and "\0" not in info.name
        if not good or not is_utf8(info.name) or len(info.name.encode()) > PATH_LIMIT:
            raise TransferRefused(f"the archive holds the path {info.name[:PATH_LIMIT]!r}")
        if len(place) > self._limits.depth:
            raise TransferRefused(f"the tree is deeper than {self._limits.depth} levels")
        if info.name in self._seen or info.name.rpartition("/")[0] not in self._folders:
            raise TransferRefused(
                f"the archive holds {info.name[:PATH_LIMIT]!r} twice, or before its directory"
            )
        if info.mode & ~0o777:
            raise TransferRefused(f"{info.name[:PATH_LIMIT]} has set-id or sticky bits")
        self._names_size += len(info.name.encode())
        if self._names_size > NAMES_LIMIT:
            raise TransferRefused(f"the paths of the tree are longer than {NAMES_LIMIT} bytes in all")
        self._seen.add(info.name)
        return place

    @contextlib.contextmanager
    def _opened(self, place: tuple[str, ...]) -> Iterator[int]:
        """Open a directory in the tree without following a link; yield its descriptor."""
        folder = os.dup(self._root)
        try:
            for name in self._named(place):
                inner = os.open(name, FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def _named(self, place: tuple[str, ...]) -> tuple[str, ...]:
        return (self._name, *place[1:]) if place else ()

    def _make_folder(self, folder: int, place: tuple[str, ...], info: tarfile.TarInfo) -> None:
        name = self._named(place)[-1]
        try:
            os.mkdir(name, 0o700, dir_fd=folder)
        except FileExistsError:
            # Opening the existing entry fails if it is not a directory.
            if not self._merge:
                raise
            os.close(os.open(name, FOLDER, dir_fd=folder))
            self._folders[info.name] = None
        else:
            self._folders[info.name] = info.mode, _time(info)

    def _replace(self, folder: int, place: tuple[str, ...], make: Callable[[str], None]) -> None:
        temporary = f".{os.urandom(8).hex()}.tmp"
        try:
            make(temporary)
            os.rename(temporary, self._named(place)[-1], src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise


def _write(folder: int, name: str, content: IO[bytes], info: tarfile.TarInfo) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(name, flags, 0o600, dir_fd=folder), "wb", buffering=0) as file:  # noqa: PTH123
        while data := content.read(_COPY_SIZE):
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        os.fchmod(file.fileno(), info.mode)
        os.utime(file.fileno(), (_time(info), _time(info)))


def _time(info: tarfile.TarInfo) -> int:
    return min(max(0, int(info.mtime)), LATEST)
