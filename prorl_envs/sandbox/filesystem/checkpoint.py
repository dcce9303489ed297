"""Host's part of a checkpoint: directories and layers. The other part is `template/checkpoint.py`."""

import itertools
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prorl_envs.sandbox.base import FrozenTree, SandboxSpec
from prorl_envs.sandbox.filesystem.directories import remove_tree
from prorl_envs.sandbox.filesystem.layered import children
from prorl_envs.sandbox.filesystem.mount_plan import SandboxFiles
from prorl_envs.sandbox.filesystem.tree_copy import copy_files

_numbers = itertools.count()
#: Layers of one directory. More would not fit into the options of a mount, which have one page.
_MOST_LAYERS = 16


class TakenCheckpoint:
    """Checkpoint of a sandbox while it is taken. The methods are called in their order here.

    Args:
        files: the sandbox's directories; `finish` adds the new layers to them.
        spec: its spec.
        base: the driver's directory, which contains all others.
    """

    def __init__(self, files: SandboxFiles, spec: SandboxSpec, base: Path) -> None:
        self._files, self._spec, self._base = files, spec, base
        places = files.places(spec)
        number = next(_numbers)
        self._layers = {
            target: (upper, base / f"layer{number}-{index}")
            for index, (target, upper) in enumerate(places.items())
        }
        #: New upper and work directories of the overlays.
        self._new = {
            target: (upper.with_name(f"{upper.name}.new"), upper.with_name(f"{upper.name}.overlay{number}"))
            for target, upper in files.private(spec).items()
        }
        #: Trees that replace many layers.
        self._merged: dict[str, FrozenTree] = {}
        self.has_mounted = False
        self.reasons: tuple[str, ...] = ()
        self.programs: tuple[str, ...] = ()

    def prepare(self) -> None:
        """Make the directories of the overlays, and merge layers if there are too many."""
        for target, (new, work) in self._new.items():
            new.mkdir(mode=0o700)
            work.mkdir(mode=0o700)
            upper, layer = self._layers[target]
            copy_mode(upper, new)
            if len(self._files.frozen.get(target, ())) >= _MOST_LAYERS:
                self._merged[target] = FrozenTree(layer.with_name(f"{layer.name}-merged"), remove_tree)
                merge(self._files.below(target)[::-1], self._merged[target].path)

    def request(self) -> dict[str, Any]:
        """Return the base directory and the trees: see `template.checkpoint.checkpoint`."""
        trees = []
        for target, (new, work) in self._new.items():
            merged = self._merged.get(target)
            below = reversed(self._files.below(target)) if merged is None else [merged.path]
            lower = [self._layers[target][0], *below]
            trees.append(
                {
                    "target": target,
                    "lower": [str(path.relative_to(self._base)) for path in lower],
                    "upper": str(new.relative_to(self._base)),
                    "work": str(work.relative_to(self._base)),
                }
            )
        return {"base": str(self._base), "trees": trees}

    async def decide(self, *, bound: list[str], programs: list[str], **_: object) -> bool:
        """Copy the directories that cannot become layers; return True if the others become layers.

        Args:
            bound: what the programs have open.
            programs: programs that new sandboxes will not have.
        """
        below = [mount.target for mount in self._spec.mounts if self._is_in_tree(mount.target)]
        self.reasons = (*bound, *(f"something is mounted at {target}" for target in below))
        self.programs = tuple(programs)
        self.has_mounted = not self.reasons
        for target, (upper, layer) in self._layers.items():
            if not self._becomes_layer(target):
                await copy_files(upper, layer, threading.Event())
        return self.has_mounted

    def finish(self) -> tuple[dict[str, tuple[FrozenTree, ...]], list[FrozenTree]]:
        """Return the frozen trees of the checkpoint, and those that the sandbox no longer uses."""
        trees, unused = {}, list(self._merged.values())
        for target, (upper, layer) in self._layers.items():
            below = self._files.frozen.get(target, ())
            if self._becomes_layer(target) and target in self._merged:
                unused.remove(self._merged[target])
                unused += below
                below = (self._merged[target],)
            trees[target] = (FrozenTree(layer, remove_tree), *(tree.share() for tree in below))
            if self._becomes_layer(target):
                upper.rename(layer)
                self._new[target][0].rename(upper)
                self._files.frozen[target] = (trees[target][0].share(), *below)
        if not self.has_mounted:
            self._remove_new()
        return trees, unused

    def _becomes_layer(self, target: str) -> bool:
        return self.has_mounted and target in self._new

    def undo(self) -> None:
        """Remove what a failed attempt has made."""
        self._remove_new()
        for path in (
            *(layer for _, layer in self._layers.values()),
            *(tree.path for tree in self._merged.values()),
        ):
            remove_tree(path)

    def _remove_new(self) -> None:
        for paths in self._new.values():
            for path in paths:
                remove_tree(path)

    def _is_in_tree(self, path: str) -> bool:
        return any(path.startswith(f"{target}/") for target in self._new)


def merge(layers: Sequence[Path], target: Path) -> None:
    """Make a directory with the files that an overlay of frozen trees shows, as hard links. Blocks.

    Args:
        layers: the trees, the highest first.
        target: new directory, on their file system.

    Raises:
        OSError: a directory cannot be read, or a path is too long.
    """
    target.mkdir(mode=0o700)
    for name, places in children(layers).items():
        if places[0].is_dir() and not places[0].is_symlink():
            merge(places, target / name)
        else:
            os.link(places[0], target / name, follow_symlinks=False)
    status = layers[0].stat()
    copy_mode(layers[0], target)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_mode(source: Path, target: Path) -> None:
    """Give the upper directory of an overlay the mode of the directory below it."""
    target.chmod(stat.S_IMODE(source.stat().st_mode))
