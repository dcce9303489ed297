"""A sandbox's files at one moment, to start others from: what a rollout branches or starts again from.

Captured are the workspace, the home, `/tmp`, and what was changed in the image and in overlay mounts. Not
captured are processes, what lies in `/run` and `/dev/shm`, and what is written while the copy is made: a file
that somebody writes to at that moment may be half there.
"""

import asyncio
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Network, SandboxSpec
from prorl_envs.sandbox.copying import Copied, CopyStopped, copy_tree
from prorl_envs.sandbox.files import remove_tree


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Made by `Sandbox.snapshot`, and its driver's: it goes with the driver, or before by `remove`.

    Args:
        spec: of the sandbox it was taken of.
        path: on the host, one directory for each of the sandbox's. Content is hostile, as in `workspace`.
        copied: how much it holds.
    """

    spec: SandboxSpec
    path: Path
    copied: Copied

    @property
    def workspace(self) -> Path:
        """Host path of the workspace as it was, for a read-only mount into another sandbox."""
        return self.path / "work"

    def check(self, spec: SandboxSpec) -> None:
        """Raises SandboxError where a sandbox of `spec` has other places than this one's."""
        ours, theirs = (
            replace(each, env={}, hostname="-", default_route=False, limits=None, network=Network())
            for each in (self.spec, spec)
        )
        if ours != theirs:
            raise SandboxError(
                "the snapshot is of a sandbox with another image, workdir, uid, mounts or masks",
                hint="start it with `snapshot.spec`; environment, host name, limits and network may differ",
            )

    async def remove(self) -> None:
        """Remove it from the disk. Idempotent; sandboxes started from it keep their files."""
        await asyncio.to_thread(remove_tree, self.path)


async def copy_trees(source: Path, target: Path, names: Iterable[str], stop: threading.Event) -> Copied:
    """Copy the directories `names` below `source` to `target`, which is made if need be.

    Args:
        stop: set it to have the copy end early; it ends early as well where the caller is cancelled.

    Raises:
        SandboxError: it cannot be copied, or was stopped; what was copied is left to the caller.
    """
    copying = asyncio.create_task(asyncio.to_thread(_copy_trees, source, target, list(names), stop))
    try:
        await asyncio.wait([copying])
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([copying])
        copying.exception()  # or the loop reports it as one that nobody looked at
        raise
    return copying.result()


def _copy_trees(source: Path, target: Path, names: list[str], stop: threading.Event) -> Copied:
    total = Copied()
    try:
        target.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            copied = copy_tree(source / name, target / name, stop)
            total.entries += copied.entries
            total.size_bytes += copied.size_bytes
    except OSError as error:
        raise SandboxError(f"the sandbox's files cannot be copied: {error}") from error
    except CopyStopped:
        raise SandboxError("the sandbox ended while its files were copied") from None
    return total


def check_mount_points(places: Mapping[str, Path], targets: Mapping[str, bool]) -> None:
    """Check that what will be mounted into copied directories lands in them.

    An agent could have put a link where a mount point was, and lead who mounts there out of the sandbox.

    Args:
        places: the copied directories on the host, by their paths inside.
        targets: absolute paths inside, and whether each is a directory.

    Raises:
        SandboxError: something else is there.
    """
    for target, is_directory in targets.items():
        path = PurePosixPath(target)
        above = [place for place in places if path != PurePosixPath(place) and path.is_relative_to(place)]
        if not above:
            continue
        place = max(above, key=len)
        parts = path.relative_to(place).parts
        for count in range(1, len(parts) + 1):
            wanted = stat.S_ISDIR if is_directory or count < len(parts) else stat.S_ISREG
            _check_kind(places[place].joinpath(*parts[:count]), target, wanted)


def _check_kind(path: Path, target: str, wanted: Callable[[int], bool]) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not wanted(mode):
        raise SandboxError(
            f"the snapshot has something else where {target} is mounted",
            hint="the agent replaced it; only a fresh sandbox can be started",
        )
