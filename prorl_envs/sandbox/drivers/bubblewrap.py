"""Driver for bubblewrap, for machines that allow user namespaces only to named programs, or whose kernel is
too old for `NamespaceDriver`. Its sandboxes are the same as those of `NamespaceDriver`."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.namespaces import NamespaceDriver, NamespaceSandbox
from prorl_envs.sandbox.drivers.probe import explain, find_bwrap
from prorl_envs.sandbox.filesystem.images import ImageUse
from prorl_envs.sandbox.filesystem.mount_plan import SandboxFiles, bwrap_arguments
from prorl_envs.sandbox.limits.enforcement import DEFAULT_LIMITS, NodeLimits
from prorl_envs.sandbox.linux.kernel_settings import TERMINALS
from prorl_envs.sandbox.linux.pidfd import Process, receive
from prorl_envs.sandbox.template.process import ForkRequest
from prorl_envs.sandbox.template.template import TEMPLATES, TemplateSpec

#: Output of the first process once it runs.
READY = b"ready\n"
#: Descriptor on which bubblewrap describes the namespaces it made (`--info-fd`).
_INFO_FD = 3
#: Read size; more than bubblewrap writes there.
_INFO_BYTES = 4096


class BubblewrapDriver(NamespaceDriver):
    """Starts sandboxes with bubblewrap.

    Args:
        root: see `NodeDriver`.
        bwrap: the bubblewrap program; None chooses `$PRORL_BWRAP`, the package's or the system's.
        templates, limits: see `NodeDriver`.

    Raises:
        SandboxError: bubblewrap is not installed, or no directory can be made.
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
        self, sandbox_id: str, options: list[str], streams: int, info: int, layers: Sequence[Path]
    ) -> Process:
        """Run bubblewrap.

        Args:
            sandbox_id: the sandbox to make.
            options: all but `--info-fd`.
            streams: descriptor of its standard streams.
            info: descriptor of its `--info-fd`.
            layers: the directories of the sandbox's image, which bubblewrap must be able to open.

        Raises:
            SandboxError: bubblewrap cannot be run.
        """
        return await self.starter.spawn(sandbox_id, self.command(options), [streams, info])

    def command(self, options: list[str]) -> list[str]:
        """Return the command with which `Template.spawn` runs bubblewrap with these options."""
        program = str(self.program)
        return [program, program, "--info-fd", str(_INFO_FD), *options]

    def _sandbox(
        self, sandbox_id: str, spec: SandboxSpec, files: SandboxFiles, image: ImageUse | None
    ) -> "BubblewrapSandbox":
        return BubblewrapSandbox(sandbox_id, spec, files, self, image)


class BubblewrapSandbox(NamespaceSandbox):
    """A running sandbox. On the host there is also bubblewrap's own process, which waits for the first."""

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
        # A file, not a pipe: if this service is killed, bubblewrap must not die of SIGPIPE, because its child
        # would then wait forever for permission to continue.
        self._info = os.memfd_create("namespaces")
        try:
            await super()._begin()
        finally:
            os.close(self._info)

    async def _run(self, lifetime: int) -> None:
        options = bwrap_arguments(self._inside, self._mounts())
        self._monitor = await self._driver.run(self.id, options, lifetime, self._info, self._files.layers)
        # The first process is the image's own shell, a child of bubblewrap, and inherits the limit.
        self.contained.bound_open_files(self._monitor.pid)

    async def _await_first(self) -> None:
        assert self._lifetime is not None
        output = b""  # of bubblewrap and the first process, up to READY or EOF
        while not output.endswith(READY) and len(output) < 16384:
            data, _ = await receive(self._lifetime, 4096)
            if not data:
                raise explain(output.decode(errors="replace"))
            output += data
        # The info is complete: bubblewrap writes it before the first process runs.
        self._first = _hold_first(json.loads(os.pread(self._info, _INFO_BYTES, 0)))
        self.contained.bound_open_files(self._first.pid)

    def _request(self, entry: str) -> ForkRequest:
        # bubblewrap does neither; the tool servers do it when they enter, before any untrusted code runs.
        return replace(super()._request(entry), settings=self._settings(), terminals=TERMINALS)

    def _processes(self) -> Iterator[Process | None]:
        yield from (self._first, self._monitor)


def _hold_first(info: dict[str, Any]) -> Process:
    """Open the sandbox's first process and verify its identity.

    Raises:
        SandboxError: the process has exited already.
    """
    pid = info["child-pid"]
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        process = Process.open(pid)
        # The pid may have been reused before it was opened, so the pid namespace is compared. The process is
        # still alive after the comparison, so it is the compared one.
        if Path(f"/proc/{pid}/ns/pid").stat().st_ino == info["pid-namespace"] and process.alive:
            return process
        process.close()
    raise SandboxError("the sandbox ended while starting")
