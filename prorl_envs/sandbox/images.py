"""The images of one driver: each is there for as long as a sandbox uses it, and some longer."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.mounted import MountedImage, identity, mount

#: Images that no sandbox uses but that stay mounted for the next, 2 MB each.
IDLE_LIMIT = 16


@dataclass(frozen=True, slots=True)
class ImageUse:
    """One sandbox's hold on an image.

    Args:
        root: the image's root file system on the host; never written to.
        key: names its mount; empty for a directory, which needs none.
    """

    root: Path
    key: str = ""


@dataclass(slots=True)
class _Held:
    mounting: asyncio.Task[MountedImage]
    users: int = 0


class Images:
    """Mounts images at first use and keeps those used last.

    Args:
        base: existing directory on a local disk, the same for all services that should share mounts.
        idle_limit: unused images that stay mounted until `aclose`.
    """

    def __init__(self, base: Path, *, idle_limit: int = IDLE_LIMIT) -> None:
        self._base = base
        self._idle_limit = idle_limit
        self._held: dict[str, _Held] = {}  # in the order of last use
        self._closed = False

    async def acquire(self, image: Path) -> ImageUse:
        """Make the image's root file system available; give it back with `release`.

        Raises:
            SandboxError: there is no such image, or this machine cannot mount it.
        """
        if await asyncio.to_thread(image.is_dir):
            return ImageUse(await asyncio.to_thread(image.resolve))
        try:
            key = await asyncio.to_thread(identity, image)
        except OSError as error:
            raise SandboxError(f"cannot read the image {image}: {error.strerror}") from error
        if self._closed:
            raise SandboxError("the driver is closed")
        held = self._held.pop(key, None) or _Held(
            asyncio.create_task(asyncio.to_thread(mount, image, self._base))
        )
        self._held[key] = held
        held.users += 1
        try:
            mounted = await asyncio.shield(held.mounting)
        except BaseException:
            held.users -= 1
            if held.mounting.done() and held.mounting.exception() is not None and self._held.get(key) is held:
                del self._held[key]
            raise
        return ImageUse(mounted.root, key)

    async def release(self, use: ImageUse) -> None:
        """Give back what `acquire` returned.

        Raises:
            SandboxError: another image, unused for long, cannot be unmounted.
        """
        if not use.key:
            return
        self._held[use.key].users -= 1
        idle = [key for key, held in self._held.items() if held.users == 0]
        for key in idle[: max(len(idle) - self._idle_limit, 0)]:
            await _unmount(self._held.pop(key))

    async def aclose(self) -> None:
        """Give up every image. Nothing may use one any more.

        Raises:
            SandboxError: one cannot be unmounted.
        """
        self._closed = True
        held, self._held = self._held, {}
        outcomes = await asyncio.gather(*map(_unmount, held.values()), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome


async def _unmount(held: _Held) -> None:
    await asyncio.wait([held.mounting])
    if held.mounting.exception() is None:
        await asyncio.to_thread(held.mounting.result().release)
