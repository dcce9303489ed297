"""Checkpoints of sandboxes: directories that never change again, and the memory of a Python session."""

import asyncio
import contextlib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from prorl_envs.sandbox.base import Checkpoint
from prorl_envs.sandbox.filesystem.directories import remove_tree


class FrozenTree:
    """Directory that nobody changes any more: a layer of the sandboxes and checkpoints that share it.

    Created with one user; removed with the last one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._users = 1

    def share(self) -> Self:
        """Add a user."""
        self._users += 1
        return self

    async def release(self) -> None:
        """Remove a user."""
        self._users -= 1
        if self._users == 0:
            await asyncio.to_thread(remove_tree, self.path)


class LayeredCheckpoint(Checkpoint):
    """Checkpoint whose files are frozen trees.

    Args:
        trees: the trees by their paths inside, the highest layer first.
        memory, copied, lost: see `Checkpoint`.
    """

    def __init__(
        self,
        trees: Mapping[str, tuple[FrozenTree, ...]],
        memory: int | None,
        copied: tuple[str, ...],
        lost: tuple[str, ...],
    ) -> None:
        super().__init__(memory, copied, lost)
        self.trees = trees

    async def close(self) -> None:
        trees, self.trees = self.trees, {}
        memory, self.memory = self.memory, None
        if memory is not None:
            os.close(memory)
        await release(trees)


def share(trees: Iterable[FrozenTree]) -> tuple[FrozenTree, ...]:
    """Add a user to each tree."""
    return tuple(tree.share() for tree in trees)


async def release(trees: Mapping[str, tuple[FrozenTree, ...]]) -> None:
    """Remove a user from each tree."""
    for layers in trees.values():
        for tree in layers:
            await tree.release()


def merge(layers: Sequence[Path], target: Path) -> None:
    """Make a directory with the files that an overlay of frozen trees shows, as hard links. Blocks.

    Args:
        layers: the trees, the lowest first.
        target: new directory, on their file system.

    Raises:
        OSError: a directory cannot be read, or a path is too long.
    """
    target.mkdir(mode=0o700)
    for layer in layers:
        _merge_directory(layer, target)


def _merge_directory(source: Path, target: Path) -> None:
    with contextlib.suppress(OSError):  # no attribute
        if os.getxattr(source, "user.overlay.opaque") == b"y":
            for path in target.iterdir():
                _remove(path)
    for entry in os.scandir(source):
        status, path = entry.stat(follow_symlinks=False), target / entry.name
        is_directory = stat.S_ISDIR(status.st_mode)
        if os.path.lexists(path) and not (is_directory and path.is_dir() and not path.is_symlink()):
            _remove(path)
        if is_directory:
            path.mkdir(mode=0o700, exist_ok=True)
            _merge_directory(Path(entry.path), path)
        elif not (stat.S_ISCHR(status.st_mode) and status.st_rdev == 0):  # how an overlay records a deletion
            os.link(entry.path, path, follow_symlinks=False)
    status = source.stat()
    target.chmod(stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink()


def copy_mode(source: Path, target: Path) -> None:
    """Give the upper directory of an overlay the mode of the directory below it."""
    target.chmod(stat.S_IMODE(source.stat().st_mode))
