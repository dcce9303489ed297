"""The driver for bubblewrap: the same sandboxes, made by a program that a machine may allow what it allows to
no other, or whose kernel is too old for `NamespaceDriver`."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.command import SandboxFiles, bwrap_arguments
from prorl_envs.sandbox.containment import DEFAULT_LIMITS, NodeLimits
from prorl_envs.sandbox.images import ImageUse
from prorl_envs.sandbox.namespaces import NamespaceDriver, NamespaceSandbox
from prorl_envs.sandbox.probe import explain, find_bwrap
from prorl_envs.sandbox.processes import Process, receive
from prorl_envs.sandbox.template import TEMPLATES, TemplateSpec

#: What the first process says once it runs.
READY = b"ready\n"
#: bubblewrap's descriptor for what it says of the namespaces it made.
_INFO_FD = 3
#: More than bubblewrap says of the namespaces it made.
_INFO_BYTES = 4096


class BubblewrapDriver(NamespaceDriver):
    """Starts sandboxes with bubblewrap.

    Args:
        root: see `NodeDriver`.
        bwrap: the bubblewrap program; None chooses `$PRORL_BWRAP`, the package's or the system's.
        templates, limits: see `NodeDriver`.

    Raises:
        SandboxError: there is no bubblewrap, or no directory can be made.
    """

    name = "bubblewrap"

    def __init__(
        self,
        root: Path | None = None,
        *,
        bwrap: Path | None = None,
        templates: Mapping[str, TemplateSpec] = TEMPLATES,
        limits: NodeLimits = DEFAULT_LIMITS,
    ) -> None:
        self.program = find_bwrap(bwrap)
        super().__init__(root, templates=templates, limits=limits)

    async def run(
        self, sandbox_id: str, options: list[str], streams: int, info: int, image: Path | None
    ) -> Process:
        """Run bubblewrap.

        Args:
            sandbox_id: whose it is.
            options: all but `--info-fd`.
            streams: descriptor of its standard streams.
            info: descriptor of its `--info-fd`.
            image: the root file system of the sandbox's image, which bubblewrap must see.

        Raises:
            SandboxError: it cannot be run.
        """
        return await self.starter.spawn(sandbox_id, self.command(options), [streams, info])

    def command(self, options: list[str]) -> list[str]:
        """What `Template.spawn` takes for bubblewrap to be run with these options."""
        program = str(self.program)
        return [program, program, "--info-fd", str(_INFO_FD), *options]

    def _sandbox(
        self, sandbox_id: str, spec: SandboxSpec, files: SandboxFiles, image: ImageUse | None
    ) -> "BubblewrapSandbox":
        return BubblewrapSandbox(sandbox_id, spec, files, self, image)


class BubblewrapSandbox(NamespaceSandbox):
    """A running sandbox. On the host there is bubblewrap's own process as well, which waits for the first."""

    def __init__(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        files: SandboxFiles,
        driver: BubblewrapDriver,
        image: ImageUse | None = None,
    ) -> None:
        super().__init__(sandbox_id, spec, files, driver, image)
        self._driver: BubblewrapDriver = driver
        self._monitor: Process | None = None
        self._info = -1

    async def _begin(self) -> None:
        # A file, not a pipe: should this service be killed, bubblewrap must not die of having no reader, for
        # its child would then wait for its word to go on, forever.
        self._info = os.memfd_create("namespaces")
        try:
            await super()._begin()
        finally:
            os.close(self._info)

    async def _run(self, lifetime: int) -> None:
        options = bwrap_arguments(self._inside, self._mounts())
        self._monitor = await self._driver.run(self.id, options, lifetime, self._info, self._files.image)

    async def _await_first(self) -> None:
        assert self._lifetime is not None
        output = b""  # of the first process and what makes it, up to READY or the end of both
        while not output.endswith(READY) and len(output) < 16384:
            data, _ = await receive(self._lifetime, 4096)
            if not data:
                raise explain(output.decode(errors="replace"))
            output += data
        # Whole: it is written before the first process runs.
        self._first = _hold_first(json.loads(os.pread(self._info, _INFO_BYTES, 0)))

    def _processes(self) -> Iterator[Process | None]:
        yield from (self._first, self._monitor)


def _hold_first(info: dict[str, Any]) -> Process:
    """The sandbox's first process, checked to be it.

    Raises:
        SandboxError: it ended already.
    """
    pid = info["child-pid"]
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        process = Process.open(pid)
        # The pid may have passed to another process before it was opened; namespaces do not lie. The process
        # is alive after the comparison, so it is the one that was compared.
        if Path(f"/proc/{pid}/ns/pid").stat().st_ino == info["pid-namespace"] and process.alive:
            return process
        process.close()
    raise SandboxError("the sandbox ended while starting")
