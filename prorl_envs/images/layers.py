"""Store of unpacked layers, on a local disk or on NFS.

layers/KEY/              a layer in overlayfs's form; added and removed by a rename, never modified
leases/KEY               users of the layer lock this file (shared); its time is the layer's last use
sizes/KEY                bytes of the layer, as text
images/NAME.layers.json  images that consist of these layers
incoming/                layers that are being created or removed
locks/                   one for each key whose layer is being created
"""

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO

from prorl_envs.errors import SandboxError
from prorl_envs.images.eviction import choose_unused, server_time
from prorl_envs.images.lock import key_lock
from prorl_envs.images.threads import in_thread
from prorl_envs.sandbox.filesystem.directories import remove_tree
from prorl_envs.sandbox.filesystem.layer_leases import LAYERS, LEASES, LayerLease, open_locked
from prorl_envs.sandbox.filesystem.layered import SUFFIX, LayeredImage, read_layered

_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_BLOCK = 512
_HOLDER = ".lock"
#: Seconds for which an interrupted download can be resumed.
_DOWNLOADS_S = 86_400.0


class LayerStore:
    """Layers by key: created once, shared by processes and nodes, evicted when unused.

    A key identifies the content: two processes that create a layer with the same key create the same. Usage:

        async with store.making(key) as place:
            if place is not None:       # None: the layer exists already
                fill(place)             # an exception discards the directory
        layer = store.layer(key)

    One rename publishes the layer, so no reader sees an incomplete one. `sweep` and `evict` remove
    directories that killed processes left. Users of layers hold a lease (`holding`), and check afterwards
    that the layers exist: eviction skips leased layers. `write_image` and `image` store the files of images.

    Args:
        root: directory, created at first use; users who share it trust each other.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._layers, self._leases = self.root / LAYERS, self.root / LEASES
        self._sizes, self._incoming = self.root / "sizes", self.root / "incoming"
        self._images = self.root / "images"

    def layer(self, key: str) -> Path | None:
        """Return the directory of a layer and record its use; None if the layer does not exist.

        Raises:
            SandboxError: the key has characters other than `a-z 0-9 . _ -`, or more than 128.
        """
        path = self._path(key)
        if not path.is_dir():
            return None
        with contextlib.suppress(OSError):  # a store that this user may only read
            (self._leases / key).touch()
        return path

    @asynccontextmanager
    async def making(
        self, key: str, *, on_wait: Callable[[], None] = lambda: None
    ) -> AsyncIterator[Path | None]:
        """Yield an empty directory that becomes the layer unless an exception leaves the block.

        Yields None if the layer exists, even if another process created it during the wait.

        Args:
            on_wait: called once if another process is creating the layer.

        Raises:
            SandboxError: the store cannot be written, or the key is invalid.
        """
        if await in_thread(self.layer, key) is not None:
            yield None
            return
        lock = await in_thread(self._lock_path, key)
        async with key_lock(lock, on_wait=on_wait):
            if await in_thread(self.layer, key) is not None:
                yield None
                return
            draft, holder = await in_thread(self._make_draft)
            try:
                yield draft
                await in_thread(self._commit, key, draft)
            finally:
                await in_thread(_discard, draft, holder)

    @contextmanager
    def holding(self, layers: Sequence[Path]) -> Iterator[None]:
        """Hold a lease of layers, so that `evict` keeps them.

        Raises:
            SandboxError: a layer was evicted before.
        """
        lease = LayerLease(layers)
        try:
            if lost := [layer for layer in layers if not layer.is_dir()]:
                raise SandboxError(f"the layer {lost[0].name} was evicted", hint="build the image again")
            yield
        finally:
            lease.release()

    @contextmanager
    def downloading(self, digest: str, size: int) -> Iterator[BinaryIO]:
        """Yield the file for a download, with the part that an interrupted download left.

        After the block, an incomplete file stays for a day. A complete file is removed, and so is any
        file if the disk fails.

        Args:
            digest: hexadecimal digest of the whole content.
            size: bytes of the whole content.

        Raises:
            SandboxError: the store cannot be written, or another process writes the file.
        """
        path = self.root / "downloads" / self._path(digest).name
        with _writing(self.root):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open_locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is None:
                raise SandboxError(f"another process downloads {digest[:16]}", hint="pull again later")
            failed = False
            with os.fdopen(lock, "r+b", buffering=0) as file:
                try:
                    yield file
                except OSError:
                    failed = True
                    raise
                finally:
                    if failed or not 0 < os.fstat(lock).st_size < size:
                        path.unlink(missing_ok=True)

    def write_image(self, name: str, image: LayeredImage) -> Path:
        """Write `images/NAME.layers.json`, atomically, and return its path.

        Raises:
            SandboxError: the name is no plain file name, or the store cannot be written.
        """
        path = self._image_path(name)
        with _writing(self.root):
            self._images.mkdir(parents=True, exist_ok=True)
            image.write(path)
        return path

    def image(self, name: str) -> Path | None:
        """Return the path of an image whose layers all exist, and record their use; else None."""
        path = self._image_path(name)
        try:
            found = read_layered(path)
        except SandboxError:
            return None
        for layer in found.layers:
            if layer.parent == self._layers:
                self.layer(layer.name)
        return path

    def images(self) -> list[Path]:
        """Return the paths of the stored images."""
        return sorted(self._images.glob(f"*{SUFFIX}"))

    def evict(self, *, max_bytes: int, unused_s: float = 0.0) -> list[str]:
        """Remove the least recently used layers until the rest fits.

        Layers with a lease stay. Also removes images that lost a layer, and the remains of killed processes.

        Args:
            max_bytes: limit of the total size of the layers.
            unused_s: layers used within this number of seconds stay in any case.

        Returns:
            The keys of the removed layers.

        Raises:
            SandboxError: the store cannot be written.
        """
        if not self._layers.is_dir():
            return []
        with _writing(self.root):
            self.sweep()
            used = [
                (self._last_use(path.name), self.size(path.name), path.name)
                for path in self._layers.iterdir()
            ]
            keep_after = server_time(self.root) - unused_s
            chosen = choose_unused(used, max_bytes=max_bytes, keep_after=keep_after)
            removed = [key for key in chosen if self._remove(key)]
            self._remove_broken_images()
        return removed

    def sweep(self) -> None:
        """Remove the remains of killed processes from the store, and old parts of downloads."""
        with contextlib.suppress(FileNotFoundError):
            old = server_time(self.root) - _DOWNLOADS_S
            for path in (self.root / "downloads").glob("*"):
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime < old:
                        path.unlink()
        for path in self._incoming.glob("*"):
            name = path.name.removesuffix(_HOLDER)
            holder = self._incoming / f"{name}{_HOLDER}"
            with contextlib.suppress(OSError):
                lock = open_locked(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock is not None:
                    _discard(self._incoming / name, lock)

    def size(self, key: str) -> int:
        """Return the bytes that a layer occupies on the disk."""
        try:
            return int((self._sizes / key).read_text())
        except (OSError, ValueError):
            return disk_bytes(self._path(key))

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise SandboxError(f"not a layer's key: {key[:200]!r}")
        return self._layers / key

    def _image_path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise SandboxError(f"not an image's name: {name[:200]!r}")
        return self._images / f"{name}{SUFFIX}"

    def _lock_path(self, key: str) -> Path:
        with _writing(self.root):
            for folder in (self._layers, self._leases, self._sizes, self._incoming, self.root / "locks"):
                folder.mkdir(parents=True, exist_ok=True)
        return self.root / "locks" / key

    def _make_draft(self) -> tuple[Path, int]:
        draft = self._incoming / secrets.token_hex(8)
        with _writing(self.root):
            holder = open_locked(draft.with_name(f"{draft.name}{_HOLDER}"), fcntl.LOCK_EX)
            assert holder is not None
            try:
                draft.mkdir(mode=0o755)
            except BaseException:
                os.close(holder)
                raise
        return draft, holder

    def _commit(self, key: str, draft: Path) -> None:
        with _writing(self.root):
            (self._sizes / key).write_text(str(disk_bytes(draft)))
            (self._leases / key).touch()
            sync_file_system(draft)
            try:
                draft.rename(self._path(key))
            except OSError:
                if not self._path(key).is_dir():
                    raise  # else, on a file system without locks, another process has created the same layer

    def _last_use(self, key: str) -> float:
        for path in (self._leases / key, self._layers / key):
            with contextlib.suppress(OSError):
                return path.stat().st_mtime
        return 0.0

    def _remove(self, key: str) -> bool:
        lease = open_locked(self._leases / key, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lease is None:
            return False
        draft, holder = self._make_draft()
        try:
            with contextlib.suppress(FileNotFoundError):
                self._path(key).rename(draft)
            for path in (self._sizes / key, self._leases / key):
                path.unlink(missing_ok=True)
        finally:
            os.close(lease)
            _discard(draft, holder)
        return True

    def _remove_broken_images(self) -> None:
        for path in self._images.glob(f"*{SUFFIX}"):
            try:
                read_layered(path)
            except SandboxError:
                path.unlink(missing_ok=True)


def _discard(draft: Path, holder: int) -> None:
    """Remove a draft, if it still exists, and then its lock."""
    try:
        remove_tree(draft)
        draft.with_name(f"{draft.name}{_HOLDER}").unlink(missing_ok=True)
    finally:
        os.close(holder)


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SandboxError(
            f"cannot write the store of layers {root}: {error.strerror}",
            hint="set image_cache, or free space",
        ) from error


def disk_bytes(tree: Path) -> int:
    """Return the bytes that a tree occupies on the disk, without unreadable parts. Follows no links."""
    total, pending = 0, [tree]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                total += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
    return total


def sync_file_system(path: Path) -> None:
    """Write a file system's data to its disk (syncfs(2)), so that a later rename never survives without it.

    Raises:
        OSError: the disk failed, or is full.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)
