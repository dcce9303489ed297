"""File trees as tar archives: supported kinds of files, and packing without following links.

Supported are directories, regular files, symbolic links that stay in the tree, permissions (without set-id
and sticky bits) and modification times. Hard links become separate files. Refused are devices, named pipes,
sockets, links that lead out of the tree, and names that are not UTF-8.
"""

import os
import stat
import tarfile
from dataclasses import dataclass
from typing import IO, Annotated, Any

import msgspec

from prorl_envs.errors import TransferRefused

#: Name of the archive's only top-level member, independent of the names on either side.
TOP = "top"
#: Maximum bytes of a path in an archive, and of a link's target.
PATH_LIMIT = 4096
#: Maximum bytes of all paths of a tree, because the unpacker keeps them in memory.
NAMES_LIMIT = 32 * 1024 * 1024
#: Maximum number of skipped entries that are named.
NAMED_LIMIT = 100
#: Latest modification time of a file, in seconds since 1970.
LATEST = 2**33
#: Flags to open a directory.
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits:
    """Maximum size of one transfer.

    Args:
        bytes: bytes of all files together.
        entries: files, directories and links.
        depth: levels of directories.
    """

    bytes: int = 1 << 30
    entries: int = 100_000
    depth: int = 64


class Transferred(msgspec.Struct, array_like=True, tag=3):
    """Totals of a transfer, and the message that ends it (`transfer.py`).

    Args:
        entries: files, directories and links.
        bytes: bytes of all files together.
        left_out: the first hundred skipped entries, each with the reason.
        left_out_count: number of all skipped entries.
    """

    entries: int = 0
    bytes: int = 0
    left_out: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=2 * PATH_LIMIT)]], msgspec.Meta(max_length=NAMED_LIMIT)
    ] = []
    left_out_count: int = 0

    def add(self, size: int, limits: TreeLimits) -> None:
        """Count one entry.

        Raises:
            TransferRefused: the entry exceeds a limit.
        """
        self.entries += 1
        self.bytes += size
        if self.entries > limits.entries:
            raise TransferRefused(f"the tree has more than {limits.entries} entries")
        if self.bytes > limits.bytes:
            raise TransferRefused(f"the tree has more than {limits.bytes} bytes")


def stays_inside(place: tuple[str, ...], target: str) -> bool:
    """Return True if a link cannot lead out of its tree. Pure.

    `..` is allowed only at the start of the target, where it counts from the real directory of the link.
    After a name, which may itself be a link, `..` may lead anywhere.

    Args:
        place: parts of the link's path; the first part is the top of the tree.
        target: target of the link.
    """
    parts = target.split("/")
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    return bool(target) and not target.startswith("/") and ".." not in parts[ups:] and ups < len(place) - 1


def pack(source: str, out: Any, limits: TreeLimits, *, skip_unsupported: bool) -> Transferred:
    """Write a file or tree as an archive.

    Args:
        source: absolute path; links on the way to it are followed, those below it are not.
        out: object with the method `write(bytes)`.
        skip_unsupported: skip unsupported files instead of failing.

    Raises:
        TransferRefused: the tree holds an unsupported kind of file, or is too large.
        OSError: an entry cannot be read.
    """
    path = os.path.realpath(source)
    parent = os.open(os.path.dirname(path), FOLDER)  # noqa: PTH120
    try:
        with tarfile.open(
            fileobj=out,
            mode="w|",
            format=tarfile.GNU_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
        ) as archive:
            packer = _Packer(archive, limits, skip_unsupported)
            packer.entry(parent, os.path.basename(path) or ".", (TOP,))  # noqa: PTH119
    finally:
        os.close(parent)
    return packer.done


class _Packer:
    def __init__(self, archive: tarfile.TarFile, limits: TreeLimits, skip_unsupported: bool) -> None:
        self._archive = archive
        self._limits = limits
        self._skip_unsupported = skip_unsupported
        self.done = Transferred()

    def entry(self, folder: int, name: str, parts: tuple[str, ...]) -> None:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if reason := self._objection(parts, status):
            self._refuse(parts, reason)
        elif stat.S_ISLNK(status.st_mode):
            target = os.readlink(name, dir_fd=folder)
            if stays_inside(parts, target) and is_utf8(target):
                self._add(parts, status, tarfile.SYMTYPE, target=target)
            else:
                self._refuse(parts, "is a link that leads out of the tree")
        else:
            # The type is checked after opening, because the entry may have been replaced since `stat`.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            try:
                fd = os.open(name, flags, dir_fd=folder)
            except PermissionError:
                self._refuse(parts, "cannot be read")
                return
            try:
                self._opened(fd, parts)
            finally:
                os.close(fd)

    def _objection(self, parts: tuple[str, ...], status: os.stat_result) -> str:
        if not is_utf8(parts[-1]):
            return "has a name that is not UTF-8"
        if len(parts) > self._limits.depth or len("/".join(parts).encode()) > PATH_LIMIT:
            return "lies too deep"
        kinds = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
        return "" if any(is_kind(status.st_mode) for is_kind in kinds) else "is a device, pipe or socket"

    def _opened(self, fd: int, parts: tuple[str, ...]) -> None:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            self._add(parts, status, tarfile.DIRTYPE)
            for name in self._names(fd):
                self.entry(fd, name, (*parts, name))
        elif not stat.S_ISREG(status.st_mode):
            self._refuse(parts, "is a device, pipe or socket")
        elif status.st_size == 0 and os.read(fd, 1):
            self._refuse(parts, "does not say its size")  # such as files in /proc
        else:
            with open(fd, "rb", closefd=False) as content:
                self._add(parts, status, tarfile.REGTYPE, content=content)

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
        parts: tuple[str, ...],
        status: os.stat_result,
        kind: bytes,
        *,
        target: str = "",
        content: IO[bytes] | None = None,
    ) -> None:
        info = tarfile.TarInfo("/".join(parts))
        info.type, info.linkname = kind, target
        info.mode = stat.S_IMODE(status.st_mode) & 0o777
        info.mtime = min(max(0, int(status.st_mtime)), LATEST)
        info.size = status.st_size if content is not None else 0
        self.done.add(info.size, self._limits)
        try:
            self._archive.addfile(info, content)
        except OSError as error:
            if error.errno is None:  # tarfile's own error: the file became shorter
                raise TransferRefused(f"{info.name} changed while it was read") from error
            raise
        self._archive.members.clear()  # type: ignore[attr-defined]  # tarfile would keep all members

    def _refuse(self, parts: tuple[str, ...], reason: str) -> None:
        name = "/".join(parts[1:] or parts).encode("utf-8", "replace").decode()
        if not self._skip_unsupported or len(parts) == 1:
            raise TransferRefused(f"{name[:PATH_LIMIT]} {reason}")
        self.done.left_out_count += 1
        if len(self.done.left_out) < NAMED_LIMIT:
            self.done.left_out.append(f"{name[:PATH_LIMIT]} {reason}")


def is_utf8(text: str) -> bool:
    """Return True if a text can be encoded as UTF-8, so that it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
