"""Driver for Apptainer and SingularityCE, for machines that allow only them to make user namespaces.

Apptainer makes one user namespace for all sandboxes of a driver, in which the whole host is visible. A
template process runs there and forks the bubblewraps that make the sandboxes. So Apptainer's start (100 ms)
and its 20 MB are paid once, and the sandboxes are the same as `BubblewrapDriver`'s.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.drivers.apptainer_probe import find_apptainer
from prorl_envs.sandbox.drivers.apptainer_wrapper import (
    doorway_command,
    doorway_environment,
    explain_doorway,
    write_doorway,
)
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.limits.enforcement import DEFAULT_LIMITS, NodeLimits
from prorl_envs.sandbox.linux.pidfd import Process
from prorl_envs.sandbox.template.process import Wrapper, environment
from prorl_envs.sandbox.template.template import TEMPLATES, Template, TemplateSpec


class ApptainerDriver(BubblewrapDriver):
    """Starts sandboxes inside Apptainer: the same as `BubblewrapDriver`'s. Never uses its setuid program.

    Args:
        root: see `NodeDriver`.
        apptainer: the program; None chooses `$PRORL_APPTAINER`, else `apptainer` or `singularity` in PATH.
        bwrap: see `BubblewrapDriver`.
        templates: see `NodeDriver`.
        limits: see `NodeDriver`.

    Raises:
        SandboxError: there is no Apptainer or no bubblewrap, or no directory can be made.
    """

    name = "apptainer"

    def __init__(
        self,
        root: Path | None = None,
        *,
        apptainer: Path | None = None,
        bwrap: Path | None = None,
        templates: Mapping[str, TemplateSpec] = TEMPLATES,
        limits: NodeLimits = DEFAULT_LIMITS,
    ) -> None:
        program = find_apptainer(apptainer)
        super().__init__(root, bwrap=bwrap, templates=templates, limits=limits)
        doorway = self.directory.path / "apptainer"
        try:
            write_doorway(doorway)
        except OSError as error:
            self.directory.remove()
            raise SandboxError(f"cannot make a directory for Apptainer: {error}") from error
        wrapper = Wrapper(
            command=tuple(doorway_command(program, doorway)),
            env=doorway_environment(doorway, environment()),
            explain=explain_doorway,
        )
        self._make_door = partial(_Door, TemplateSpec(entries=(), wrapper=wrapper), limits.nice)
        self._door = self._make_door()
        self._choosing = asyncio.Lock()

    @property
    def door_pid(self) -> int | None:
        """Pid of the running Apptainer, for operators; None if none was started."""
        return self._door.template.pid

    async def _warm_starter(self) -> None:
        await self._door.template.start()

    async def run(
        self, sandbox_id: str, options: list[str], streams: int, info: int, layers: Sequence[Path]
    ) -> Process:
        """Run bubblewrap inside Apptainer."""
        door = await self._door_showing(layers)
        try:
            return await door.template.spawn(sandbox_id, self.command(options), [streams, info])
        finally:
            await self._leave(door)

    async def _release(self) -> None:
        await self._door.template.aclose()
        await super()._release()

    async def _door_showing(self, layers: Sequence[Path]) -> "_Door":
        """Return an Apptainer run in which the directories of an image are visible, counted as in use.

        A SIF mounted after Apptainer's start is visible only if the host propagates its mounts.
        """
        async with self._choosing:
            await self._door.template.start()
            if not await asyncio.to_thread(lambda: all(map(self._door.shows, layers))):
                stale, self._door = self._door, self._make_door()
                await self._leave(stale, entered=False)
            self._door.users += 1
            return self._door

    async def _leave(self, door: "_Door", *, entered: bool = True) -> None:
        door.users -= entered
        if door is not self._door and door.users == 0:
            await door.template.aclose()


class _Door:
    """One run of Apptainer. Sandboxes made in it outlive it."""

    def __init__(self, spec: TemplateSpec, nice: int) -> None:
        self.template = Template("apptainer", spec, nice=nice)
        self.users = 0

    def shows(self, path: Path) -> bool:
        """Return True if `path` is the same file inside Apptainer as on the host."""
        there = Path(f"/proc/{self.template.own_pid}/root{path}")
        try:
            return there.samefile(path)
        except OSError:
            return False
