"""Unpacks a layer of an OCI image into overlayfs's form, as an ordinary user, without the files' owners.

A whiteout `.wh.NAME` becomes a character device 0:0, and `.wh..wh..opq` an attribute of its directory (OCI
image specification, layer.md; kernel documentation, filesystems/overlayfs). The tar is hostile: this module,
not the kernel, resolves names and links below the target directory, and everything is counted.
"""

import contextlib
import errno
import gzip
import hashlib
import io
import os
import stat
import sys
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.filesystem.directories import remove_tree
from prorl_envs.sandbox.filesystem.layered import OPAQUE_ATTRIBUTE, LayerTree, is_whiteout

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_CHUNK = 1 << 20
#: Most bytes of one entry's headers, which tarfile keeps in memory. Attributes have at most 64 KiB each.
_HEADERS_LIMIT = 4 << 20
_WHITEOUT, _OPAQUE, _RESERVED = ".wh.", ".wh..wh..opq", ".wh..wh."
_ATTRIBUTE = "SCHILY.xattr."
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_TIME_LIMIT = 1 << 40
_DAMAGED = (
    tarfile.TarError,
    zlib.error,
    zstd.ZstdError,
    gzip.BadGzipFile,
    EOFError,
    RecursionError,
    ValueError,
)


class LayerRefused(SandboxError):
    """Error for a layer that is damaged, hostile or too large. Another attempt would fail too."""

    retryable = False

    def __init__(self, message: str, *, hint: str = "the image is damaged or hostile: use another") -> None:
        super().__init__(message, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackLimits:
    """Limits of one layer.

    Args:
        unpacked_bytes: most bytes of the decompressed tar, and of all files in it.
        entries: most files, directories and links.
        ratio: most decompressed bytes per compressed byte.
        ratio_from: decompressed bytes from which `ratio` applies.
        path_bytes: most bytes of a name in the layer.
    """

    unpacked_bytes: int = 64 << 30
    entries: int = 2_000_000
    ratio: int = 200
    ratio_from: int = 1 << 30
    path_bytes: int = 3000


def unpack_layer(
    stream: BinaryIO, place: Path, *, diff_id: str = "", limits: UnpackLimits | None = None
) -> str:
    """Unpack a layer: a tar, plain or compressed with gzip or zstd. Blocks.

    All files belong to this user, who may read and write all of them and enter all directories. Setuid and
    setgid bits, security attributes and devices are left out.

    Args:
        stream: the compressed layer, whose digest the caller verifies.
        place: empty directory.
        diff_id: digest that the decompressed tar must have (`sha256:...`); "" accepts any.

    Returns:
        The digest of the decompressed tar.

    Raises:
        LayerRefused: the layer is damaged or hostile, exceeds a limit, or has another digest.
        SandboxError: the directory cannot be written.
    """
    limits = limits or UnpackLimits()
    try:
        with _decompressed(stream, limits) as tar:
            _Unpacker(tar, place, limits).run()
            tar.drain()
    except _DAMAGED as error:
        raise LayerRefused(
            f"a layer of the image is damaged: {error}", hint="pull the image again"
        ) from error
    except OSError as error:
        raise _unwritable(place, error) from error
    if diff_id and tar.digest != diff_id:
        raise LayerRefused(
            f"a layer has the digest {tar.digest}, not {diff_id}", hint="the image is damaged in its registry"
        )
    return tar.digest


class _CountedInput(io.RawIOBase):
    """Compressed input that counts its bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview[int]") -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)


class _TarStream:
    """Decompressed tar for `tarfile`. Reads only forward, computes the digest and enforces the limits."""

    def __init__(self, stream: BinaryIO, compressed: _CountedInput, limits: UnpackLimits) -> None:
        self._stream = stream
        self._compressed = compressed
        self._limits = limits
        self._digest = hashlib.sha256()
        self._position = 0
        self._headers_left: int | None = _HEADERS_LIMIT

    @property
    def digest(self) -> str:
        return f"sha256:{self._digest.hexdigest()}"

    def tell(self) -> int:
        return self._position

    def expect_headers(self) -> None:
        """Bound the bytes of the headers that follow, until `expect_data`."""
        self._headers_left = _HEADERS_LIMIT

    def expect_data(self) -> None:
        self._headers_left = None

    def read(self, size: int) -> bytes:
        if self._headers_left is not None:
            self._headers_left -= size
        if size < 0 or (self._headers_left or 0) < 0:
            raise LayerRefused("a layer of the image has headers that are too long")
        return self._take(size)

    def _take(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._digest.update(data)
        self._position += len(data)
        limits = self._limits
        if self._position > limits.unpacked_bytes:
            raise LayerRefused(
                f"a layer unpacks to more than {limits.unpacked_bytes} bytes", hint="raise image_build_bytes"
            )
        if self._position > max(limits.ratio_from, limits.ratio * self._compressed.count):
            raise LayerRefused(f"a layer unpacks to more than {limits.ratio} times its size")
        return data

    def seek(self, position: int) -> None:
        if position < self._position:
            raise LayerRefused("a layer of the image has a header with an invalid size")
        while self._position < position and self._take(min(_CHUNK, position - self._position)):
            pass

    def drain(self) -> None:
        """Read the rest, because it belongs to the digest."""
        while self._take(_CHUNK):
            pass


@contextmanager
def _decompressed(stream: BinaryIO, limits: UnpackLimits) -> Iterator[_TarStream]:
    counted = _CountedInput(stream)
    buffered = io.BufferedReader(counted, _CHUNK)
    start = buffered.peek(4)[:4]
    opened = cast(BinaryIO, buffered)
    if start.startswith(_GZIP):
        opened = cast(BinaryIO, gzip.GzipFile(fileobj=buffered))
    elif start == _ZSTD:
        opened = cast(BinaryIO, zstd.ZstdFile(buffered))
    try:
        yield _TarStream(opened, counted, limits)
    finally:
        if opened is not buffered:
            opened.close()


class _Unpacker:
    """Unpacks one layer.

    Args:
        stream: the tar.
        place: empty directory for the files.
    """

    def __init__(self, stream: _TarStream, place: Path, limits: UnpackLimits) -> None:
        self._stream = stream
        self._place = place
        self._tree = LayerTree([place])
        self._limits = limits
        self._times: dict[Path, float] = {}
        self._parent: tuple[tuple[str, ...], Path] = ((), place)
        self._written = 0
        self._entries = 0

    def run(self) -> None:
        with tarfile.open(fileobj=cast(BinaryIO, self._stream), mode="r:") as tar:
            while (member := tar.next()) is not None:
                self._stream.expect_data()
                self._count()
                self._add(tar, member)
                self._stream.expect_headers()
                _clear_members(tar)
        for path, when in self._times.items():
            os.utime(path, (when, when))

    def _count(self) -> None:
        self._entries += 1
        if self._entries > self._limits.entries:
            raise LayerRefused(f"a layer has more than {self._limits.entries} entries")

    def _add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = self._parts(member.name)
        if not parts:
            if member.isdir():
                self._add_directory(self._place, member)
            return
        parent = self._enter(parts[:-1])
        name = parts[-1]
        if name.startswith(_WHITEOUT):
            self._apply_whiteout(parent, name)
            return
        path = parent / name
        if member.isdir():
            self._add_directory(path, member)
        elif member.islnk():
            self._add_hard_link(path, member)
        elif member.issym():
            self._clear(path)
            path.symlink_to(member.linkname)
        elif member.isreg():
            self._add_file(path, tar, member)
        elif member.isfifo():
            self._clear(path)
            os.mkfifo(path, member.mode & 0o777 | 0o600)

    def _parts(self, name: str) -> tuple[str, ...]:
        if len(os.fsencode(name)) > self._limits.path_bytes or "\0" in name:
            raise LayerRefused(f"a layer has a name that is too long or invalid: {name[:80]!r}...")
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        if ".." in parts:
            raise LayerRefused(f"a layer has a name that leads out of the image: {name[:200]!r}")
        return parts

    def _enter(self, parts: tuple[str, ...]) -> Path:
        """Return the directory at a path, following links inside the layer. Create it if it is missing."""
        if self._parent[0] == parts:
            return self._parent[1]
        try:
            resolved = self._tree.resolve("/" + "/".join(parts))
        except SandboxError as error:
            raise LayerRefused("a layer has links that form a loop") from error
        path = self._place
        for part in PurePosixPath(resolved).parts[1:]:
            path /= part
            if not path.is_dir():
                self._make_directory(path)
        self._parent = (parts, path)
        return path

    def _add_directory(self, path: Path, member: tarfile.TarInfo) -> None:
        if path.is_symlink() or not path.is_dir():
            self._make_directory(path)
        path.chmod(member.mode & 0o1777 | 0o700)
        _set_attributes(path, member)
        self._times[path] = _time(member)

    def _make_directory(self, path: Path) -> None:
        """Create a directory in place of any other entry. In place of a whiteout, it becomes opaque: it hides
        the directory of lower layers."""
        hides = path.exists(follow_symlinks=False) and is_whiteout(path.lstat())
        self._clear(path)
        path.mkdir(mode=0o755)
        path.chmod(0o755)
        if hides:
            _make_opaque(path)

    def _add_file(self, path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self._clear(path)
        self._written += member.size
        if self._written > self._limits.unpacked_bytes:  # the tar may be smaller, if files are sparse
            raise LayerRefused(
                f"a layer's files have more than {self._limits.unpacked_bytes} bytes",
                hint="raise image_build_bytes",
            )
        content = tar.extractfile(member)
        assert content is not None
        with path.open("xb") as file:
            remaining = member.size
            while remaining and (data := content.read(min(_CHUNK, remaining))):
                file.write(data)
                remaining -= len(data)
            os.fchmod(file.fileno(), member.mode & 0o777 | 0o600)
        if remaining:
            raise LayerRefused("a layer of the image is cut off", hint="pull the image again")
        _set_attributes(path, member)
        os.utime(path, (_time(member),) * 2)

    def _add_hard_link(self, path: Path, member: tarfile.TarInfo) -> None:
        parts = self._parts(member.linkname)
        target = self._enter(parts[:-1]) / parts[-1] if parts else self._place
        try:
            mode = target.lstat().st_mode
        except FileNotFoundError:
            mode = 0
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise LayerRefused(f"a layer has a hard link to a missing file: {member.linkname[:200]!r}")
        if path != target:
            self._clear(path)
            os.link(target, path, follow_symlinks=False)

    def _apply_whiteout(self, parent: Path, name: str) -> None:
        """Apply a whiteout. It hides entries of lower layers only, not those of this layer."""
        if name == _OPAQUE:
            _make_opaque(parent)
            return
        hidden = name.removeprefix(_WHITEOUT)
        if name.startswith(_RESERVED):
            return  # a file of aufs itself
        if hidden in ("", ".", ".."):
            raise LayerRefused(f"a layer has an invalid whiteout: {name!r}")
        path = parent / hidden
        if path.is_symlink() or path.exists():
            if path.is_dir() and not path.is_symlink():
                _make_opaque(path)
            return
        os.mknod(path, stat.S_IFCHR | 0o600, 0)

    def _clear(self, path: Path) -> None:
        """Remove an earlier entry of the same name."""
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            remove_tree(path)
            # A link may replace the directory: forget all paths through it.
            self._parent = ((), self._place)
            self._times.clear()
        else:
            path.unlink()


def _clear_members(tar: Any) -> None:
    """Clear the members and global headers of a `TarFile`, which grow without limit."""
    tar.members = []
    tar.pax_headers.clear()


def _make_opaque(directory: Path) -> None:
    try:
        os.setxattr(directory, OPAQUE_ATTRIBUTE, b"y", follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        raise SandboxError(
            f"the file system of {directory} has no user attributes, which this image's layers need",
            hint="set image_cache to another file system",
        ) from error


def _set_attributes(path: Path, member: tarfile.TarInfo) -> None:
    """Set the attributes that an ordinary user may set, except those that overlayfs uses."""
    for header, value in member.pax_headers.items():
        name = header.removeprefix(_ATTRIBUTE)
        if name == header or not name.startswith("user.") or name.startswith("user.overlay."):
            continue
        with contextlib.suppress(OSError, ValueError):  # too large, or the file system has no attributes
            os.setxattr(path, name, value.encode(errors="surrogateescape"), follow_symlinks=False)


def _time(member: tarfile.TarInfo) -> float:
    return float(member.mtime) if 0 <= member.mtime <= _TIME_LIMIT else 0.0


def _unwritable(place: Path, error: OSError) -> SandboxError:
    if error.errno == errno.EPERM:
        return SandboxError(
            f"cannot unpack a layer into {place}: {error.strerror}",
            hint="whiteouts of an ordinary user need Linux 5.8 or later, and a local file system",
        )
    return SandboxError(
        f"cannot unpack a layer into {place}: {error.strerror}", hint="set image_cache, or free space"
    )
