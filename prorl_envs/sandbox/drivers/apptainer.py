"""Driver for Apptainer and SingularityCE, for machines that allow only them to create user namespaces.

Apptainer creates one user namespace for all sandboxes of a driver, in which the whole host is visible. A
template process runs there and forks the bubblewraps that create the sandboxes. So Apptainer's start (100 ms)
and its 20 MB are needed once, and the sandboxes are the same as those of `BubblewrapDriver`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.drivers.apptainer_probe import find_apptainer
from prorl_envs.sandbox.drivers.apptainer_wrapper import (
    explain_wrapper,
    wrapper_command,
    wrapper_environment,
    write_container,
)
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.limits.enforcement import DEFAULT_LIMITS, NodeLimits
from prorl_envs.sandbox.linux.pidfd import Process
from prorl_envs.sandbox.template.process import Wrapper, environment
from prorl_envs.sandbox.template.template import TEMPLATES, Template, TemplateSpec


class ApptainerDriver(BubblewrapDriver):
    """Starts the sandboxes of `BubblewrapDriver` inside Apptainer. Never uses Apptainer's setuid program.

    Args:
        root: see `NodeDriver`.
        apptainer: the program; None chooses `$PRORL_APPTAINER`, else `apptainer` or `singularity` in PATH.
        bwrap: see `BubblewrapDriver`.
        templates: see `NodeDriver`.
        limits: see `NodeDriver`.

    Raises:
        SandboxError: there is no Apptainer or no bubblewrap, or no directory can be created.
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
        container = self.directory.path / "apptainer"
        try:
            write_container(container)
        except OSError as error:
            self.directory.remove()
            raise SandboxError(f"cannot make a directory for Apptainer: {error}") from error
        wrapper = Wrapper(
            command=tuple(wrapper_command(program, container)),
            env=wrapper_environment(container, environment()),
            explain=explain_wrapper,
        )
        self._new_run = partial(_ApptainerRun, TemplateSpec(entries=(), wrapper=wrapper), limits.nice)
        self._current_run = self._new_run()
        self._choosing = asyncio.Lock()

    async def _warm_starter(self) -> None:
        await self._current_run.template.start()

    async def run(self, options: list[str], streams: int, info: int, layers: Sequence[Path]) -> Process:
        """Run bubblewrap inside Apptainer."""
        apptainer = await self._run_showing(layers)
        try:
            process = await apptainer.template.start()
            return await process.spawn(self.command(options), [streams, info])
        finally:
            await self._leave(apptainer)

    async def _release(self) -> None:
        await self._current_run.template.aclose()
        await super()._release()

    async def _run_showing(self, layers: Sequence[Path]) -> "_ApptainerRun":
        """Return a run of Apptainer that shows the directories of an image, and count it as in use.

        A SIF that is mounted after Apptainer's start is visible only if the host propagates its mounts.
        """
        async with self._choosing:
            await self._current_run.template.start()
            if not await asyncio.to_thread(lambda: all(map(self._current_run.shows, layers))):
                stale, self._current_run = self._current_run, self._new_run()
                await self._leave(stale, entered=False)
            self._current_run.users += 1
            return self._current_run

    async def _leave(self, apptainer: "_ApptainerRun", *, entered: bool = True) -> None:
        apptainer.users -= entered
        if apptainer is not self._current_run and apptainer.users == 0:
            await apptainer.template.aclose()


class _ApptainerRun:
    """One run of Apptainer. Sandboxes that were created in it outlive it."""

    def __init__(self, spec: TemplateSpec, nice: int) -> None:
        self.template = Template("apptainer", spec, nice=nice)
        self.users = 0

    def shows(self, path: Path) -> bool:
        """Return True if `path` is the same file inside Apptainer as on the host."""
        inside = Path(f"/proc/{self.template.inner_pid}/root{path}")
        try:
            return inside.samefile(path)
        except OSError:
            return False
