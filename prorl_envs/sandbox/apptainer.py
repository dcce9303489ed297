"""The driver for Apptainer and SingularityCE: the same sandboxes, where it alone may make user namespaces.

Apptainer makes one user namespace for all sandboxes of a driver, in which the whole host is to be seen. A
template process runs there, and forks the bubblewraps that make the sandboxes. So Apptainer's start of
100 ms and its 20 MB are paid once, and a sandbox is made as it is without.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.apptainer_probe import find_apptainer
from prorl_envs.sandbox.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.containment import DEFAULT_LIMITS, NodeLimits
from prorl_envs.sandbox.doorway import doorway_command, doorway_environment, explain_doorway, write_doorway
from prorl_envs.sandbox.processes import Process
from prorl_envs.sandbox.template import TEMPLATES, Template, TemplateSpec
from prorl_envs.sandbox.template_process import Wrapper, environment


class ApptainerDriver(BubblewrapDriver):
    """Starts sandboxes inside Apptainer: the same as `BubblewrapDriver`'s. Its setuid program is never used.

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
        """Of the Apptainer that runs, for operators; None where none was started."""
        return self._door.template.pid

    async def _warm_starter(self) -> None:
        await self._door.template.start()

    async def run(
        self, sandbox_id: str, options: list[str], streams: int, info: int, image: Path | None
    ) -> Process:
        """Run bubblewrap inside Apptainer."""
        door = await self._door_showing(image)
        try:
            return await door.template.spawn(sandbox_id, self.command(options), [streams, info])
        finally:
            await self._leave(door)

    async def _release(self) -> None:
        await self._door.template.aclose()
        await super()._release()

    async def _door_showing(self, image: Path | None) -> "_Door":
        """A door, entered, through which `image` is to be seen.

        A SIF that was mounted after the door's start is, only if the host passes its mounts on.
        """
        async with self._choosing:
            await self._door.template.start()
            if image is not None and not await asyncio.to_thread(self._door.shows, image):
                stale, self._door = self._door, self._make_door()
                await self._leave(stale, entered=False)
            self._door.users += 1
            return self._door

    async def _leave(self, door: "_Door", *, entered: bool = True) -> None:
        door.users -= entered
        if door is not self._door and door.users == 0:
            await door.template.aclose()


class _Door:
    """One run of Apptainer. A sandbox made through it outlives it."""

    def __init__(self, spec: TemplateSpec, nice: int) -> None:
        self.template = Template("apptainer", spec, nice=nice)
        self.users = 0

    def shows(self, path: Path) -> bool:
        """Whether `path` is the same there as here."""
        there = Path(f"/proc/{self.template.own_pid}/root{path}")
        try:
            return there.samefile(path)
        except OSError:
            return False
