"""Bounded history of edited files."""

from collections import OrderedDict
from dataclasses import dataclass

#: Maximum versions of one file, maximum files, and maximum bytes of all versions.
VERSIONS_LIMIT = 20
FILES_LIMIT = 1000
BYTES_LIMIT = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Version:
    """Version of a file.

    Args:
        data: content of the file.
        mode: permissions to restore; None keeps the current permissions.
    """

    data: bytes
    mode: int | None = None


class UndoHistory:
    """History of versions. The versions of the least recently edited files are dropped first. Pure."""

    def __init__(self) -> None:
        self._bytes = 0
        # By path, the newest edit last: the version before it (None if there was no file), and the digest of
        # what it wrote.
        self._files: OrderedDict[str, list[tuple[Version | None, int]]] = OrderedDict()

    def has(self, path: str) -> bool:
        """Return True if `pop` has a version to return."""
        return path in self._files

    def is_newer(self, path: str, data: bytes) -> bool:
        """Return True if `data` is not what the newest edit of `path` wrote.

        Raises:
            KeyError: no version is left.
        """
        return self._files[path][-1][1] != hash(data)

    def push(self, path: str, before: Version | None, after: bytes | None) -> None:
        """Remember an edit: the version before it, and what it wrote (None: it removed the file)."""
        edits = self._files.setdefault(path, [])
        self._files.move_to_end(path)
        edits.append((before, hash(after)))
        self._bytes += _size(before)
        if len(edits) > VERSIONS_LIMIT:
            self._bytes -= _size(edits.pop(0)[0])
        while self._bytes > BYTES_LIMIT or len(self._files) > FILES_LIMIT:
            self._forget_oldest()

    def pop(self, path: str) -> Version | None:
        """Remove and return the newest version of `path`.

        Raises:
            KeyError: no version is left.
        """
        edits = self._files[path]
        version, _ = edits.pop()
        self._bytes -= _size(version)
        if not edits:
            del self._files[path]
        return version

    def _forget_oldest(self) -> None:
        path, edits = next(iter(self._files.items()))
        self._bytes -= _size(edits.pop(0)[0])
        if not edits:
            del self._files[path]


def _size(version: Version | None) -> int:
    return len(version.data) if version is not None else 0
