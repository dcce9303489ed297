"""Trees of files as tar archives: packed without following links, unpacked without trusting a word.

Carried are directories, regular files, symbolic links that stay in the tree, permissions (without set-id and
sticky bits) and modification times. Hard links become files of their own. All else is refused: devices, named
pipes, sockets, links that lead out, names that are not UTF-8.

The archive is GNU tar as Python's `tarfile` writes and reads it. Of its extraction nothing is used: the
`data` filter checks paths by name before they are opened, and links can lead it astray (CVE-2025-4517 and
its siblings, mended in 3.12.11). Here every directory is opened from its parent, following no link.
"""

import contextlib
import os
import secrets
import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Self

from prorl_envs.errors import TransferRefused

#: The archive's only top-level member: what is carried, under whatever name it has on either side.
TOP = "top"
#: Bytes of a path in an archive, and of a link's target.
PATH_LIMIT = 4096
#: How many of the things left out are named.
NAMED_LIMIT = 100
_COPY_SIZE = 256 * 1024
_LATEST = 2**33  # seconds since 1970
_LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_CARRIED = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits:
    """The most that is carried at a time.

    Args:
        bytes: of all files together.
        entries: files, directories and links.
        depth: levels of directories.
    """

    bytes: int = 1 << 30
    entries: int = 100_000
    depth: int = 64


@dataclass(slots=True)
class Transferred:
    """What was carried.

    Args:
        entries: files, directories and links.
        bytes: of all files together.
        left_out: what was not carried, each with the reason; the first hundred.
        left_out_count: how many those are in all.
    """

    entries: int = 0
    bytes: int = 0
    left_out: list[str] = field(default_factory=list)
    left_out_count: int = 0

    def add(self, size: int, limits: TreeLimits) -> None:
        """Count one entry.

        Raises:
            TransferRefused: it is one too many.
        """
        self.entries += 1
        self.bytes += size
        if self.entries > limits.entries:
            raise TransferRefused(f"the tree has more than {limits.entries} entries")
        if self.bytes > limits.bytes:
            raise TransferRefused(f"the tree has more than {limits.bytes} bytes")


def stays_inside(place: tuple[str, ...], target: str) -> bool:
    """Whether a link cannot lead out of its tree. Pure.

    `..` may come only at the beginning of its target: there it counts from the real directory of the link.
    Behind a name, which may be a link, nobody knows by name alone where it leads.

    Args:
        place: the link's own path, from the top of the tree (which is its first part).
        target: what the link says.
    """
    parts = target.split("/")
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    return bool(target) and not target.startswith("/") and ".." not in parts[ups:] and ups < len(place) - 1


def pack(source: str, out: Any, limits: TreeLimits, *, leave_out: bool) -> Transferred:
    """Write a file or tree as an archive.

    Args:
        source: absolute path; links on the way to it are followed, those below it are not.
        out: has `write(bytes)`.
        leave_out: whether to leave out what cannot be carried.

    Raises:
        TransferRefused: there is something that cannot be carried, or too much.
        OSError: something cannot be read.
    """
    path = os.path.realpath(source)
    parent = os.open(os.path.dirname(path), _FOLDER)  # noqa: PTH120
    try:
        with tarfile.open(
            fileobj=out,
            mode="w|",
            format=tarfile.GNU_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
        ) as archive:
            packer = _Packer(archive, limits, leave_out)
            packer.entry(parent, os.path.basename(path) or ".", (TOP,))  # noqa: PTH119
    finally:
        os.close(parent)
    return packer.done


class _Packer:
    def __init__(self, archive: tarfile.TarFile, limits: TreeLimits, leave_out: bool) -> None:
        self._archive = archive
        self._limits = limits
        self._leave_out = leave_out
        self.done = Transferred()

    def entry(self, folder: int, name: str, place: tuple[str, ...]) -> None:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if why := self._objection(place, status):
            self._refuse(place, why)
        elif stat.S_ISLNK(status.st_mode):
            target = os.readlink(name, dir_fd=folder)
            if stays_inside(place, target) and _is_utf8(target):
                self._add(place, status, tarfile.SYMTYPE, target=target)
            else:
                self._refuse(place, "is a link that leads out of the tree")
        else:
            # Opened first: it may be another thing by now than it was a moment ago.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            try:
                fd = os.open(name, flags, dir_fd=folder)
            except PermissionError:
                self._refuse(place, "cannot be read")
                return
            try:
                self._opened(fd, place)
            finally:
                os.close(fd)

    def _objection(self, place: tuple[str, ...], status: os.stat_result) -> str:
        if not _is_utf8(place[-1]):
            return "has a name that is not UTF-8"
        if len(place) > self._limits.depth or len("/".join(place).encode()) > PATH_LIMIT:
            return "lies too deep"
        kinds = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
        return "" if any(is_kind(status.st_mode) for is_kind in kinds) else "is a device, pipe or socket"

    def _opened(self, fd: int, place: tuple[str, ...]) -> None:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            self._add(place, status, tarfile.DIRTYPE)
            for name in self._names(fd):
                self.entry(fd, name, (*place, name))
        elif not stat.S_ISREG(status.st_mode):
            self._refuse(place, "is a device, pipe or socket")
        elif status.st_size == 0 and os.read(fd, 1):
            self._refuse(place, "does not say its size")  # as below /proc
        else:
            with open(fd, "rb", closefd=False) as content:
                self._add(place, status, tarfile.REGTYPE, content=content)

    def _names(self, folder: int) -> list[str]:
        names: list[str] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                names.append(entry.name)
                if self.done.entries + len(names) > self._limits.entries:
                    raise TransferRefused(f"the tree has more than {self._limits.entries} entries")
        return sorted(names)

    def _add(
        self,
        place: tuple[str, ...],
        status: os.stat_result,
        kind: bytes,
        *,
        target: str = "",
        content: IO[bytes] | None = None,
    ) -> None:
        info = tarfile.TarInfo("/".join(place))
        info.type, info.linkname = kind, target
        info.mode = stat.S_IMODE(status.st_mode) & 0o777
        info.mtime = min(max(0, int(status.st_mtime)), _LATEST)
        info.size = status.st_size if content is not None else 0
        self.done.add(info.size, self._limits)
        try:
            self._archive.addfile(info, content)
        except OSError as error:
            if error.errno is None:  # tarfile's own: it is shorter than it was
                raise TransferRefused(f"{info.name} changed while it was read") from error
            raise
        self._archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all

    def _refuse(self, place: tuple[str, ...], why: str) -> None:
        name = "/".join(place[1:] or place).encode("utf-8", "replace").decode()
        if not self._leave_out or len(place) == 1:
            raise TransferRefused(f"{name[:PATH_LIMIT]} {why}")
        self.done.left_out_count += 1
        if len(self.done.left_out) < NAMED_LIMIT:
            self.done.left_out.append(f"{name[:PATH_LIMIT]} {why}")


class _Header(tarfile.TarInfo):
    """A member's header; refuses what `pack` never writes before tarfile acts on it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        info = super().frombuf(buf, encoding, errors)
        # A long name is read whole, and extended headers are worse.
        if info.type in _LONG and not 0 <= info.size <= PATH_LIMIT + 1:
            raise TransferRefused("the archive holds a name that is too long")
        if info.type not in (*_LONG, *_CARRIED):
            raise TransferRefused(f"the archive holds a member of type {info.type!r}")
        if info.size < 0:
            raise TransferRefused("the archive holds a negative size")
        return info


def unpack(archive: Any, folder: int, name: str, limits: TreeLimits, *, merge: bool) -> Transferred:
    """Make a file or tree from an archive that anybody may have written.

    Args:
        archive: has `read(size)`.
        folder: descriptor of the directory it is made in; it is left open.
        name: what it is called there.
        merge: whether it may exist: then its directories are gone into, and files and links in them replaced,
            each in one step.

    Raises:
        TransferRefused: it holds what `pack` never writes, or too much.
        OSError: something cannot be written.
    """
    unpacker = _Unpacker(folder, name, limits, merge)
    try:
        with tarfile.open(
            fileobj=archive, mode="r|", tarinfo=_Header, encoding="utf-8", errors="surrogateescape"
        ) as opened:
            while (info := opened.next()) is not None:
                opened.members.clear()  # type: ignore[attr-defined]
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
        self._seen: set[tuple[str, ...]] = set()
        #: The directories of the tree; those it has made, with what they become in the end.
        self._folders: dict[tuple[str, ...], tarfile.TarInfo | None] = {(): None}
        self.done = Transferred()

    def entry(self, archive: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        place = self._place(info)
        self.done.add(info.size if info.isreg() else 0, self._limits)
        with self._opened(place[:-1]) as folder:
            if info.isdir():
                self._make_folder(folder, place, info)
            elif info.issym():
                if not stays_inside(place, info.linkname) or not _is_utf8(info.linkname):
                    raise TransferRefused(f"{info.name[:PATH_LIMIT]} is a link that leads out of the tree")
                self._replace(folder, place, lambda name: os.symlink(info.linkname, name, dir_fd=folder))
            else:
                content = archive.extractfile(info)
                assert content is not None
                self._replace(folder, place, lambda name: _write(folder, name, content, info))

    def finish(self) -> None:
        """Give the directories their permissions and times: last, for both would stand in the way."""
        for place, info in reversed(self._folders.items()):
            if info is not None:
                with self._opened(place) as folder:
                    os.fchmod(folder, info.mode | 0o700)
                    os.utime(folder, (_time(info), _time(info)))

    def _place(self, info: tarfile.TarInfo) -> tuple[str, ...]:
        """Where a member goes; each must come after its directory, and once."""
        place = tuple(info.name.split("/"))
        good = place[0] == TOP and not {"", ".", ".."} & set(place) and "\0" not in info.name
        if not good or not _is_utf8(info.name) or len(info.name.encode()) > PATH_LIMIT:
            raise TransferRefused(f"the archive holds the path {info.name[:PATH_LIMIT]!r}")
        if len(place) > self._limits.depth:
            raise TransferRefused(f"the tree is deeper than {self._limits.depth} levels")
        if place in self._seen or place[:-1] not in self._folders:
            raise TransferRefused(
                f"the archive holds {info.name[:PATH_LIMIT]!r} twice, or before its directory"
            )
        if info.mode & ~0o777:
            raise TransferRefused(f"{info.name[:PATH_LIMIT]} has set-id or sticky bits")
        self._seen.add(place)
        return place

    @contextlib.contextmanager
    def _opened(self, place: tuple[str, ...]) -> Iterator[int]:
        """A descriptor of a directory in the tree, reached without following a link."""
        folder = os.dup(self._root)
        try:
            for name in self._named(place):
                inner = os.open(name, _FOLDER, dir_fd=folder)
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
            # Going into it will show whether it is a directory.
            if not self._merge:
                raise
            os.close(os.open(name, _FOLDER, dir_fd=folder))
            self._folders[place] = None
        else:
            self._folders[place] = info

    def _replace(self, folder: int, place: tuple[str, ...], make: Callable[[str], None]) -> None:
        temporary = f".{secrets.token_hex(8)}.tmp"
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
    return min(max(0, int(info.mtime)), _LATEST)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
