"""Store of built images: a directory, which may be on NFS or Lustre and shared by nodes.

    entries/NAME-KEY-BUILD/{image.sif, entry.json, used}   added and removed by a rename; never modified
    incoming/                                              entries that are being added or removed
    locks/                                                 one for each key that is being built

Everything here blocks.
"""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from prorl_envs.errors import SandboxError
from prorl_envs.images.digest import of_stream
from prorl_envs.images.eviction import choose_unused, server_time
from prorl_envs.sandbox.filesystem.directories import remove_tree
from prorl_envs.sandbox.filesystem.sif import labels

_IMAGE, _ENTRY, _USED = "image.sif", "entry.json", "used"
_DAY_S = 86_400.0
_PATH_LIMIT = 3000
_ENTRY_LIMIT = 1 << 20


class StoredImage(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a built image.

    Args:
        id: name of its directory, unique.
        key: digest of its components.
        name, version: name and version of the template; for other sources the version is empty.
        source: description of its source, for people.
        made: seconds since 1970.
        size: bytes of the file.
        digest: SHA-256 of the file.
        content: its components, as a value; `key` is its digest.
    """

    id: str
    key: str
    name: str
    version: str
    source: str
    made: float
    size: int
    digest: str
    content: dict[str, object]


class ImageStore:
    """Cache of images in the directory `root`, which is created at first use."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        if len(os.fsencode(self.root)) > _PATH_LIMIT:
            raise SandboxError("the path of the image cache is too long", hint="set image_cache")
        self._entries, self._incoming = self.root / "entries", self.root / "incoming"

    def lock_path(self, key: str) -> Path:
        """Return the path of a key's lock; create its directory."""
        return _created(self.root / "locks") / f"{key[:32]}.lock"

    def image(self, entry: StoredImage) -> Path:
        """Return the path of an entry's SIF."""
        return self._entries / entry.id / _IMAGE

    def entries(self) -> list[StoredImage]:
        """Return all entries, oldest first, without damaged ones."""
        return sorted(self._readable("*"), key=lambda entry: entry.made)

    def find(self, key: str) -> StoredImage | None:
        """Return the newest image of this key."""
        return max(self._readable(f"*-{key[:16]}-*", key=key), key=lambda entry: entry.made, default=None)

    def find_version(self, name: str, version: str) -> StoredImage | None:
        """Return the newest image that has this name and version in its own labels."""
        found = [e for e in self._readable(f"{name}-*") if (e.name, e.version) == (name, version)]
        for entry in sorted(found, key=lambda entry: -entry.made):
            with contextlib.suppress(SandboxError):
                found_labels = labels(self.image(entry))
                if (found_labels.get("prorl.template"), found_labels.get("prorl.version")) == (name, version):
                    return entry
        return None

    def use(self, entry: StoredImage) -> Path:
        """Return the path of an image, and record its use if the cache is writable."""
        with contextlib.suppress(OSError):
            (self._entries / entry.id / _USED).touch()
        return self.image(entry)

    def add(
        self, built: Path, *, key: str, name: str, version: str, source: str, content: dict[str, object]
    ) -> StoredImage:
        """Add an image.

        Args:
            built: the file to copy, on any file system.

        Raises:
            SandboxError: the cache is not writable.
        """
        unique = f"{name}-{key[:16]}-{secrets.token_hex(4)}"
        try:
            incoming = _created(self._incoming) / unique
            incoming.mkdir()
            try:
                with built.open("rb") as file, (incoming / _IMAGE).open("xb") as copy:
                    digest, size = of_stream(file, copy)
                    copy.flush()
                    os.fsync(copy.fileno())
                entry = StoredImage(
                    id=unique, key=key, name=name, version=version, source=source, made=time.time(),
                    size=size, digest=digest, content=content,
                )  # fmt: skip
                (incoming / _ENTRY).write_bytes(msgspec.json.encode(entry))
                (incoming / _USED).touch()
                incoming.rename(_created(self._entries) / unique)
            except BaseException:
                shutil.rmtree(incoming, ignore_errors=True)
                raise
        except OSError as error:
            raise _unwritable(self.root, error) from error
        return entry

    def remove(self, entries: Iterable[StoredImage]) -> None:
        """Remove images. A mounted image stays usable on this node; on other nodes, NFS may lose it.

        Raises:
            SandboxError: the cache is not writable.
        """
        try:
            for entry in entries:
                leaving = _created(self._incoming) / f"gone-{secrets.token_hex(8)}"
                with contextlib.suppress(FileNotFoundError):
                    (self._entries / entry.id).rename(leaving)
                    remove_tree(leaving)
        except OSError as error:
            raise _unwritable(self.root, error) from error

    def prune(self, limit_bytes: int, *, unused_s: float = _DAY_S) -> list[StoredImage]:
        """Remove the least recently used images until the rest fits, and the remains of killed builders.

        Args:
            limit_bytes: limit of the total size of the images.
            unused_s: images used within this number of seconds stay in any case.

        Returns:
            The removed images.

        Raises:
            SandboxError: the cache is not writable.
        """
        if not self.root.is_dir():
            return []
        now = self._server_now()
        used = [(self._used(entry), entry.size, entry) for entry in self.entries()]
        chosen = choose_unused(used, max_bytes=limit_bytes, keep_after=now - unused_s)
        self.remove(chosen)
        for folder in (self._incoming, self.root / "locks"):
            for path in folder.glob("*"):
                with contextlib.suppress(OSError):
                    if now - path.stat().st_mtime > _DAY_S:
                        remove_tree(path) if path.is_dir() else path.unlink()
        return chosen

    def _readable(self, pattern: str, *, key: str | None = None) -> Iterator[StoredImage]:
        for folder in self._entries.glob(pattern):
            try:
                with (folder / _ENTRY).open("rb") as file:
                    entry = msgspec.json.decode(file.read(_ENTRY_LIMIT), type=StoredImage)
                size = (folder / _IMAGE).stat().st_size
            except (OSError, msgspec.DecodeError):
                continue
            if entry.id == folder.name and entry.size == size and key in (None, entry.key):
                yield entry

    def _used(self, entry: StoredImage) -> float:
        try:
            return (self._entries / entry.id / _USED).stat().st_mtime
        except OSError:
            return entry.made

    def _server_now(self) -> float:
        try:
            return server_time(_created(self._incoming))
        except OSError as error:
            raise _unwritable(self.root, error) from error


def _created(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def _unwritable(root: Path, error: OSError) -> SandboxError:
    return SandboxError(f"cannot write the image cache {root}: {error.strerror}", hint="set image_cache")
