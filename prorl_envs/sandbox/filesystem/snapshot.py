"""Snapshot of a sandbox's files, from which a rollout branches or restarts.

It has the workspace, the home directory, `/tmp`, and the changes to the image and to overlay mounts. It has
no processes, nothing of `/run` and `/dev/shm`, and no data written during the copy: a file that is being
written at that moment may be incomplete.
"""

import asyncio
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Network, SandboxSpec
from prorl_envs.sandbox.filesystem.directories import remove_tree
from prorl_envs.sandbox.filesystem.tree_copy import CopyStopped, copy_tree


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot made by `Sandbox.snapshot`; owned by the driver, and removed with it or by `remove`.

    Args:
        spec: spec of the original sandbox.
        path: host directory with a copy of each of the sandbox's directories. Its content is untrusted.
        work: path of the workspace below `path`; None if it is a directory of the image.
    """

    spec: SandboxSpec
    path: Path
    work: str | None = "work"

    @property
    def workspace(self) -> Path:
        """Host path of the copied workspace, for a read-only mount into another sandbox.

        Raises:
            SandboxError: the image has the workspace's directory: see `Sandbox.workspace`.
        """
        if self.work is None:
            raise no_workspace(self.spec)
        return self.path / self.work

    def check(self, spec: SandboxSpec) -> None:
        """Raise SandboxError if a sandbox of `spec` has other directories than this snapshot."""
        original, other = (
            replace(each, env={}, hostname="-", default_route=False, limits=None, network=Network())
            for each in (self.spec, spec)
        )
        if original != other:
            raise SandboxError(
                "the snapshot is of a sandbox with another image, workdir, uid, mounts or masks",
                hint="start it with `snapshot.spec`; environment, host name, limits and network may differ",
            )

    async def remove(self) -> None:
        """Remove the snapshot from the disk. Idempotent; sandboxes started from it keep their files."""
        await asyncio.to_thread(remove_tree, self.path)


def no_workspace(spec: SandboxSpec) -> SandboxError:
    """Return the error for users of the workspace of a sandbox that has none on the host."""
    return SandboxError(
        f"no directory of the host has all files of {spec.workdir}: some are in the image",
        hint="read and write its files with the tools of the sandbox",
    )


async def copy_trees(source: Path, target: Path, names: Iterable[str], stop: threading.Event) -> None:
    """Copy the directories `names` below `source` to `target`, which is created if necessary.

    Args:
        stop: set it to stop the copy early; cancelling the caller sets it too.

    Raises:
        SandboxError: copying failed, or was stopped; the caller removes the partial copy.
    """
    copying = asyncio.create_task(asyncio.to_thread(_copy_trees, source, target, list(names), stop))
    try:
        await asyncio.wait([copying])
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([copying])
        copying.exception()  # else the loop logs an exception that was never retrieved
        raise
    copying.result()


def _copy_trees(source: Path, target: Path, names: list[str], stop: threading.Event) -> None:
    try:
        target.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            copy_tree(source / name, target / name, stop)
    except OSError as error:
        raise SandboxError(f"the sandbox's files cannot be copied: {error}") from error
    except CopyStopped:
        raise SandboxError("the sandbox stopped while its files were copied") from None


def check_mount_points(places: Mapping[str, Path], targets: Mapping[str, bool]) -> None:
    """Check that no mount into a copied directory leads out of it.

    An agent could replace a mount point by a link, and thereby redirect the mount out of the sandbox.

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
            f"the mount point {target} was replaced in the snapshot",
            hint="the agent did that; only a fresh sandbox can be started",
        )
