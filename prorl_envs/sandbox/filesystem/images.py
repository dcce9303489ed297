"""Images that a driver has mounted for its sandboxes, and a few for the next ones."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.filesystem.layer_leases import LayerLease
from prorl_envs.sandbox.filesystem.layered import check_layers, is_layered, read_layered
from prorl_envs.sandbox.filesystem.sif_mounts import MountedImage, mount

#: Image that sandboxes can use until it is released.
type AvailableImage = MountedImage | LayerLease

#: Unused images that stay mounted for the next sandbox, 2 MB each.
IDLE_LIMIT = 16


@dataclass(frozen=True, slots=True)
class ImageUse:
    """One sandbox's reference to an image.

    Args:
        layers: the directories of its root file system on the host, the lowest first; never written to.
        key: identifies the mount or the layers; empty for a directory, which is not mounted.
    """

    layers: tuple[Path, ...]
    key: tuple[int, ...] = ()


@dataclass(slots=True)
class _ImageEntry:
    mounting: asyncio.Task[AvailableImage]
    users: int = 0


class Images:
    """Mounts images at first use and keeps the most recently used ones mounted.

    Args:
        directory: the driver's directory, below which images are mounted.
        idle_limit: unused images that stay mounted until `aclose`.
    """

    def __init__(self, directory: Path, *, idle_limit: int = IDLE_LIMIT) -> None:
        self._directory = directory
        self._idle_limit = idle_limit
        self._images: dict[tuple[int, ...], _ImageEntry] = {}  # in the order of last use
        self._closed = False

    async def acquire(self, image: Path) -> ImageUse:
        """Make the image's root file system available until `release`.

        Raises:
            SandboxError: there is no such image, or this machine cannot mount it.
        """
        if await asyncio.to_thread(image.is_dir):
            return ImageUse((await asyncio.to_thread(image.resolve),))
        try:
            key = await asyncio.to_thread(_identity, image)
        except OSError as error:
            raise SandboxError(f"cannot read the image {image}: {error.strerror}") from error
        if self._closed:
            raise SandboxError("the driver is closed")
        entry = self._images.pop(key, None) or _ImageEntry(
            asyncio.create_task(asyncio.to_thread(_make_available, image, self._directory))
        )
        self._images[key] = entry
        entry.users += 1
        try:
            mounted = await asyncio.shield(entry.mounting)
        except BaseException:
            entry.users -= 1
            failed = entry.mounting.done() and entry.mounting.exception() is not None
            if failed and self._images.get(key) is entry:
                del self._images[key]
            raise
        return ImageUse(mounted.layers, key)

    async def release(self, use: ImageUse) -> None:
        """Return an image that `acquire` gave. Unmounts the longest unused images above the idle limit.

        Raises:
            SandboxError: an unused image cannot be unmounted.
        """
        if not use.key:
            return
        self._images[use.key].users -= 1
        idle = [key for key, entry in self._images.items() if entry.users == 0]
        for key in idle[: max(len(idle) - self._idle_limit, 0)]:
            await _unmount(self._images.pop(key))

    async def aclose(self) -> None:
        """Release every image. No sandbox may use any of them.

        Raises:
            SandboxError: an image cannot be unmounted.
        """
        self._closed = True
        entries, self._images = self._images, {}
        outcomes = await asyncio.gather(*map(_unmount, entries.values()), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome


def _make_available(image: Path, directory: Path) -> AvailableImage:
    if not is_layered(image):
        return mount(image, directory)
    try:
        lease = LayerLease(read_layered(image).layers)
    except OSError as error:
        raise SandboxError(f"cannot use the image {image}: {error}", hint="build it again") from error
    try:
        check_layers(image, lease.layers)  # a layer may have been evicted before the lease
    except BaseException:
        lease.release()
        raise
    return lease


async def _unmount(entry: _ImageEntry) -> None:
    await asyncio.wait([entry.mounting])
    if entry.mounting.exception() is None:
        await asyncio.to_thread(entry.mounting.result().release)


def _identity(image: Path) -> tuple[int, ...]:
    """Return a key for the image, from the file's current metadata."""
    found = image.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
