"""Writes the files of COPY, ADD and WORKDIR into a layer, on the host.

Sources and destinations are untrusted. Both are views of layers (`LayerTree`): links are resolved below their
root, and never by the kernel. A build context is a view of one layer.
"""

import hashlib
import itertools
import os
import posixpath
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from prorl_envs.errors import InputError
from prorl_envs.images.digest import of_stream
from prorl_envs.images.dockerfile.ignore import IgnoreRules, glob_expression, is_glob
from prorl_envs.sandbox.filesystem.directories import remove_tree
from prorl_envs.sandbox.filesystem.layered import OPAQUE_ATTRIBUTE, LayerEntry, LayerTree, children, is_opaque

_CHUNK = 1 << 20
_DEPTH_LIMIT = 200
#: Classes of users in a clause such as `ug+rw`, and its operations.
_CLAUSE = re.compile(r"([ugoa]*)((?:[-+=](?:[ugo]|[rwxXst]*))+)")
_OPERATION = re.compile(r"([-+=])([ugo]|[rwxXst]*)")
_SHIFTS = {"u": 6, "g": 3, "o": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    """Limits of one instruction.

    Args:
        size_bytes: most bytes of all its files.
        entries: most files, directories and links.
    """

    size_bytes: int = 16 << 30
    entries: int = 1_000_000


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """File, directory or link of a source.

    Args:
        path: path relative to the source; "" is the source itself.
        host: path on the host, which may be a link.
        status: status of that path.
    """

    path: str
    host: Path
    status: os.stat_result


class SourceTree:
    """Tree from which files are copied: a build context, a stage, or an image.

    Args:
        layers: directories, the lowest first.
        rules: rules that exclude paths.
        name: its name in messages.
    """

    def __init__(
        self, layers: Sequence[Path], *, rules: IgnoreRules | None = None, name: str = "the build context"
    ) -> None:
        self._tree = LayerTree(layers)
        self.name = name
        self._rules = rules or IgnoreRules(())

    def select(self, pattern: str, *, any_depth: bool = False) -> list[str]:
        """Return the relative paths that match a pattern, sorted and with unresolved links.

        As in BuildKit, a pattern may match nothing, but the path before its first special part must exist.

        Args:
            any_depth: whether `**` stands for any number of directories; else it is like `*`.

        Raises:
            InputError: such a path is missing, or the pattern leads out of the tree.
        """
        parts = _relative(pattern).split("/")
        plain = list(itertools.takewhile(lambda part: not is_glob(part), parts))
        if not self._exists("/".join(plain)):
            raise InputError(
                f"{pattern} is not in {self.name}",
                hint="is it excluded by .dockerignore, or in another directory?",
            )
        found = self._matches("/".join(plain), parts[len(plain) :], any_depth)
        return sorted(path for path in found if not _is_below(path, found))

    def walk(self, path: str, limits: CopyLimits, excluded: IgnoreRules) -> Iterator[SourceEntry]:
        """Yield the entry at a path and all entries below it, parents first, without special files.

        Args:
            path: relative path, whose links are resolved.
            excluded: further rules, for paths relative to `path`.

        Raises:
            InputError: there are too many entries, or they are nested too deeply.
        """
        count = 0
        for below, entry_places in self._walk(path, excluded):
            status = entry_places[0].lstat()
            if not _is_plain(status.st_mode):
                continue
            count += 1
            if count > limits.entries:
                raise InputError(f"{path} has more than {limits.entries} files", hint="use .dockerignore")
            yield SourceEntry(below, entry_places[0], status)

    def _walk(self, path: str, excluded: IgnoreRules) -> Iterator[tuple[str, list[Path]]]:
        """Yield the entry at a path and those below it, parents first: relative paths and host paths."""
        found = self._locate(path)
        pending = [("", [Path(host) for host in found.hosts])]
        while pending:
            below, places = pending.pop()
            if not places or self._skips(found.path, below, excluded):
                continue
            if below.count("/") > _DEPTH_LIMIT:
                raise InputError(f"directories are nested more than {_DEPTH_LIMIT} deep")
            yield below, places
            if stat.S_ISDIR(places[0].lstat().st_mode):
                entries = children(places)
                names = sorted(entries, reverse=True)
                pending += [(posixpath.join(below, name), entries[name]) for name in names]

    def _skips(self, root: str, below: str, excluded: IgnoreRules) -> bool:
        """Return True if neither a path nor any path below it can be included."""
        path = posixpath.join(root, below).strip("/")
        if below and excluded.excludes(below) and not excluded.has_exceptions:
            return True
        return bool(path) and self._rules.excludes(path) and not self._rules.has_exceptions

    def includes(self, path: str) -> bool:
        """Return False if the rules of this tree exclude a relative path."""
        return path in ("", ".") or not self._rules.excludes(path)

    def file(self, path: str) -> Path | None:
        """Return the host path of the regular file at a relative path; None if there is none."""
        found = self._locate(path)
        return Path(found.hosts[0]) if found.kind == stat.S_IFREG else None

    def real_path(self, path: str) -> str:
        """Return a relative path with its links resolved."""
        return self._locate(path).path.strip("/")

    def _locate(self, path: str) -> LayerEntry:
        return self._tree.locate(f"/{path}")

    def _exists(self, path: str) -> bool:
        found = self._locate(path)
        if not found.kind:
            return False
        kept = found.kind == stat.S_IFDIR and self._rules.has_exceptions
        return kept or self.includes(found.path.strip("/"))

    def _matches(self, root: str, parts: Sequence[str], any_depth: bool) -> set[str]:
        """Return the paths that match. Links to directories are followed if further parts come."""
        found = {root}
        for part in parts:
            if part == "**" and any_depth:
                found = {path for parent in found for path in self._directories(parent)}
                continue
            expression = glob_expression(part) if is_glob(part) else None
            following = {
                posixpath.join(parent, name)
                for parent in found
                for name in (self._names(parent) if expression else [part])
                if expression is None or expression.fullmatch(name)
            }
            found = {path for path in following if self._exists(path)}
        return found

    def _directories(self, path: str) -> Iterator[str]:
        """Yield a directory and all directories below it."""
        for below, places in self._walk(path, IgnoreRules(())):
            if stat.S_ISDIR(places[0].lstat().st_mode):
                yield posixpath.join(path, below).rstrip("/")

    def _names(self, path: str) -> list[str]:
        return sorted(children([Path(host) for host in self._locate(path).hosts]))


def _relative(source: str) -> str:
    parts = [part for part in source.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise InputError(
            f"{source} leads out of its directory", hint="copy files from within the context only"
        )
    if "\0" in source:
        raise InputError("a name contains a zero byte")
    return "/".join(parts)


def _is_below(path: str, others: Set[str]) -> bool:
    """Return True if one of the other paths contains a path."""
    parts = path.split("/") if path else []
    return any("/".join(parts[:count]) in others for count in range(len(parts)))


def _is_plain(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRequest:
    """COPY or ADD, with its variables replaced.

    Args:
        sources: patterns of paths in the source tree.
        documents: contents by name, for sources that are documents in the Dockerfile.
        destination: absolute path inside; a directory if it ends in `/`.
        mode: mode of the copied files, or its change (see `change_mode`); "" keeps the mode of each file.
        keeps_parents: whether the parents of a source are created below the destination.
        excluded: patterns relative to each source.
        unpacked: for sources that are archives, directories on the host with their content.
    """

    sources: Sequence[str]
    destination: str
    documents: Mapping[str, bytes] = field(default_factory=dict)
    mode: str = ""
    keeps_parents: bool = False
    excluded: Sequence[str] = ()
    unpacked: Mapping[str, Path] = field(default_factory=dict)


class FileCopier:
    """Copies the files of a request into a layer.

    Args:
        source: the tree of its sources.
        request: the request.
        limits: limits of the copy.
    """

    def __init__(self, source: SourceTree, request: CopyRequest, limits: CopyLimits | None = None) -> None:
        self._source, self._request, self._limits = source, request, limits or CopyLimits()
        self._excluded = IgnoreRules(request.excluded)
        self._written = 0

    def digest(self) -> str:
        """Return the digest of the files: names, kinds, permissions, contents. Blocks.

        Raises:
            InputError: a file is missing or cannot be read.
        """
        total = hashlib.sha256()
        for name, content in self._request.documents.items():
            total.update(repr((name, hashlib.sha256(content).hexdigest())).encode())
        try:
            for path, _ in self._selected():
                for entry in self._entries(path):
                    total.update(repr((path, entry.path, *_identity(entry))).encode())
        except OSError as error:
            raise InputError(f"cannot read {error.filename}: {error.strerror}") from error
        return total.hexdigest()

    def copy(self, writer: "LayerWriter") -> None:
        """Write the files into a layer. Blocks.

        Raises:
            InputError: a file is missing, cannot be read, or does not fit the destination.
        """
        request = self._request
        selected = list(self._selected())
        destination = request.destination
        several = len(selected) + len(request.documents) > 1
        into = destination.endswith(("/", "/.")) or several or writer.is_directory(destination)
        try:
            for name, content in request.documents.items():
                place = posixpath.join(destination, name) if into else destination
                writer.write_file(place, content, change_mode(request.mode, 0o644))
            for path, kept in selected:
                self._copy_source(path, kept, writer, into)
        except OSError as error:
            raise InputError(f"cannot copy {error.filename}: {error.strerror}") from error

    def _selected(self) -> Iterator[tuple[str, str]]:
        """Yield the paths of the sources, and for `--parents` the part of each that the copy keeps."""
        for source in self._request.sources:
            if not self._request.keeps_parents:
                yield from ((path, "") for path in self._source.select(source))
                continue
            dropped = source.partition("/./")[0] if "/./" in source else ""
            depth = len([part for part in dropped.split("/") if part not in ("", ".")])
            for path in self._source.select(source, any_depth=True):
                yield path, "/".join(path.split("/")[depth:])

    def _copy_source(self, path: str, kept: str, writer: "LayerWriter", into: bool) -> None:
        destination = self._request.destination
        if self._request.keeps_parents:
            destination, into = posixpath.join(destination, kept), False
        if (unpacked := self._request.unpacked.get(path)) is not None:
            self._merge(
                SourceTree([unpacked]).walk("", self._limits, IgnoreRules(())), writer, destination, ""
            )
            return
        entries = list(self._entries(path))
        if not entries:
            return
        if not stat.S_ISDIR(entries[0].status.st_mode) and into:
            destination = posixpath.join(destination, posixpath.basename(path))
        self._merge(iter(entries), writer, destination, self._request.mode)

    def _merge(
        self, entries: Iterator[SourceEntry], writer: "LayerWriter", destination: str, mode: str
    ) -> None:
        for entry in entries:
            if stat.S_ISREG(entry.status.st_mode):
                self._written += entry.status.st_size
                if self._written > self._limits.size_bytes:
                    raise InputError(f"more than {self._limits.size_bytes} bytes", hint="use .dockerignore")
            writer.write_entry(posixpath.join(destination, entry.path).rstrip("/") or "/", entry, mode)

    def _entries(self, path: str) -> Iterator[SourceEntry]:
        """Yield the entries of a source that are not excluded, and always the source itself."""
        real = self._source.real_path(path)
        for entry in self._source.walk(path, self._limits, self._excluded):
            full_path = posixpath.join(real, entry.path).strip("/")
            included = self._source.includes(full_path) and not (
                entry.path and self._excluded.excludes(entry.path)
            )
            if included or not entry.path:
                yield entry


def _identity(entry: SourceEntry) -> tuple[object, ...]:
    mode = entry.status.st_mode
    if stat.S_ISLNK(mode):
        return ("link", os.fsencode(entry.host.readlink()))
    if stat.S_ISDIR(mode):
        return ("directory", mode & 0o1777)
    with _open(entry.host) as file:
        return ("file", mode & 0o777, of_stream(file)[0])


def _open(path: Path) -> BinaryIO:
    """Open a regular file without following a link and without waiting for a pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InputError(f"{path.name} was replaced during the build")
    return os.fdopen(fd, "rb")


class LayerWriter:
    """Writes a new layer above others. All files belong to this user, who may read and write them.

    Args:
        layers: the layers below, the lowest first.
        draft: directory of the new layer.
    """

    def __init__(self, layers: Sequence[Path], draft: Path) -> None:
        self._draft = draft
        self._tree = LayerTree((*layers, draft))
        root = layers[-1].lstat().st_mode if layers else 0o755
        draft.chmod(stat.S_IMODE(root) | 0o700)

    def is_directory(self, path: str) -> bool:
        """Return True if a path is a directory or a link to one."""
        return self._tree.kind(path) == stat.S_IFDIR

    def make_directory(self, path: str, mode: int = 0o755) -> Path:
        """Create a directory with its parents; existing ones keep their modes. Return its host path.

        Raises:
            InputError: one of them is a file.
        """
        resolved = self._tree.resolve(path)
        inside, host = "", self._draft
        parts = [part for part in resolved.split("/") if part]
        for number, part in enumerate(parts, start=1):
            inside, host = f"{inside}/{part}", host / part
            found = self._tree.find(inside)
            if found is not None and not stat.S_ISDIR(found.lstat().st_mode):
                raise InputError(f"{inside} is a file, not a directory")
            if not host.is_dir():
                host.mkdir()
                default = mode if number == len(parts) else 0o755
                host.chmod((default if found is None else stat.S_IMODE(found.lstat().st_mode)) | 0o700)
        return host

    def write_file(self, path: str, content: bytes, mode: int) -> None:
        """Write a file in place of any other entry."""
        host = self._place(path)
        host.write_bytes(content)
        host.chmod(mode & 0o777 | 0o600)

    def write_entry(self, path: str, entry: SourceEntry, mode: str) -> None:
        """Write a copy of an entry. A directory is merged with an existing one; others are replaced."""
        original = entry.status.st_mode
        if stat.S_ISDIR(original):
            self._write_directory(path, change_mode(mode, original))
            return
        host = self._place(path)
        if stat.S_ISLNK(original):
            host.symlink_to(entry.host.readlink())
            return
        with _open(entry.host) as source, host.open("xb") as target:
            shutil.copyfileobj(source, target, _CHUNK)
        host.chmod(change_mode(mode, original) & 0o777 | 0o600)
        os.utime(host, ns=(entry.status.st_mtime_ns, entry.status.st_mtime_ns))

    def _write_directory(self, path: str, mode: int) -> None:
        found = self._tree.locate(path)
        if found.kind not in (0, stat.S_IFDIR):
            parent, name = posixpath.split(found.path)
            host = self.make_directory(parent) / name
            host.unlink(missing_ok=True)
            host.mkdir()
            os.setxattr(host, OPAQUE_ATTRIBUTE, b"y")  # lower directories that the file hid stay hidden
            host.chmod(mode & 0o1777 | 0o700)
            return
        self.make_directory(path, mode & 0o1777)

    def _place(self, path: str) -> Path:
        """Remove the layer's entry at a path, and return the host path for a new file or link.

        A link at the path itself is removed, not followed.
        """
        parent, name = posixpath.split(path.rstrip("/"))
        if name in ("", ".", ".."):
            raise InputError(f"{path} is not the name of a file")
        host = self.make_directory(parent) / name
        if host.is_dir() and not host.is_symlink():
            remove_tree(host)
        host.unlink(missing_ok=True)
        return host


def change_mode(change: str, mode: int) -> int:
    """Return the mode that `--chmod` makes of a mode.

    Symbols work as in chmod (POSIX) with the mask 0: an operation without classes is for all of them. `s` has
    no effect, because copies drop setuid and setgid bits.

    Args:
        change: octal number, clauses such as `u=rwX,go+r,o-w`, or "" for no change.
        mode: mode of a file, with its type.

    Raises:
        InputError: the change is neither.
    """
    if re.fullmatch("[0-7]{1,12}", change) and int(change, 8) <= 0o7777:
        return int(change, 8)
    changed = mode
    for clause in change.split(",") if change else ():
        found = _CLAUSE.fullmatch(clause)
        if found is None:
            raise InputError(
                f"--chmod={change} is not a mode", hint="write it as 0755, or in symbols, such as u=rwX,go=rX"
            )
        classes = "ugo" if not found[1] or "a" in found[1] else found[1]
        for operation, symbols in _OPERATION.findall(found[2]):
            changed = _changed(changed, classes, operation, _bits(symbols, classes, mode, changed))
    return changed


def _bits(symbols: str, classes: str, mode: int, changed: int) -> int:
    """Return the bits that symbols mean for classes of users."""
    if symbols in _SHIFTS:
        digit = changed >> _SHIFTS[symbols] & 0o7
    else:
        executable = stat.S_ISDIR(mode) or mode & 0o111
        digit = 4 * ("r" in symbols) | 2 * ("w" in symbols)
        digit |= "x" in symbols or ("X" in symbols and bool(executable))
    return _spread(digit, classes) | 0o1000 * ("t" in symbols and classes != "o")


def _spread(digit: int, classes: str) -> int:
    return sum(digit << _SHIFTS[name] for name in set(classes))


def _changed(mode: int, classes: str, operation: str, bits: int) -> int:
    if operation == "-":
        return mode & ~bits
    return (mode & ~_spread(0o7, classes) if operation == "=" else mode) | bits


def is_unchanged(layer: Path, below: Sequence[Path]) -> bool:
    """Return True if a layer changes nothing: it has only directories that exist below with equal modes."""
    tree = LayerTree(below)
    pending = [""]
    while pending:
        inside = pending.pop()
        host = layer / inside[1:]
        found = tree.find(inside or "/")
        status = host.lstat()
        if (
            found is None
            or is_opaque(host)
            or stat.S_IMODE(found.lstat().st_mode) != stat.S_IMODE(status.st_mode)
        ):
            return False
        with os.scandir(host) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    return False
                pending.append(f"{inside}/{entry.name}")
    return True
