"""A driver without isolation, for trusted use on machines that allow no user namespaces.

Same contract, same tool server, no walls: what runs in it is this user on this machine.
"""

import asyncio
import contextlib
import os
import signal
import socket
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.command import DEFAULT_ENV, check
from prorl_envs.sandbox.files import DriverDirectory, node_local_base, remove_tree, sweep
from prorl_envs.sandbox.template import TEMPLATES, Template, TemplateSpec
from prorl_envs.sandbox.template_process import ForkRequest, ToolServer

#: Marks every process of a sandbox, for there is no pid namespace to end them by.
MARK = "PRORL_LOCAL_SANDBOX"


class NoIsolationWarning(UserWarning):
    """Commands run unconfined on this machine."""


class LocalDriver:
    """Runs "sandboxes" as plain directories. Isolates nothing, and warns that it does.

    Args:
        root: see `BubblewrapDriver`.
        templates: see `BubblewrapDriver`.

    Raises:
        SandboxError: no directory can be made.
    """

    name = "local"

    def __init__(
        self, root: Path | None = None, *, templates: Mapping[str, TemplateSpec] = TEMPLATES
    ) -> None:
        warnings.warn(
            "LocalDriver isolates nothing: whatever a model writes runs as you on this machine",
            NoIsolationWarning,
            stacklevel=2,
        )
        self._directory = DriverDirectory(root.resolve() if root is not None else node_local_base())
        self.templates = {name: Template(name, spec) for name, spec in templates.items()}
        self._sandboxes: set[LocalSandbox] = set()
        self._started = 0
        self._closing: asyncio.Task[None] | None = None

    async def start(self, spec: SandboxSpec) -> "LocalSandbox":
        """Make a directory.

        Raises:
            SandboxError: the spec asks for what takes a mount namespace.
        """
        if self._closing is not None:
            raise SandboxError("the driver is closed")
        check(spec)
        _refuse_mounts(spec)
        self._started += 1
        sandbox_id = f"{self._directory.path.name.rpartition('-')[2]}-{self._started}"
        sandbox = LocalSandbox(sandbox_id, spec, self._directory.path / str(self._started), self)
        self._sandboxes.add(sandbox)
        return sandbox

    async def warm(self, *names: str) -> None:
        """Start templates ahead of their first use; all of them where none is named."""
        await asyncio.gather(*(self.templates[name].start() for name in names or self.templates))

    async def aclose(self) -> None:
        """See `BubblewrapDriver.aclose`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._aclose())
        await asyncio.shield(self._closing)

    async def _aclose(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in tuple(self._sandboxes)))
        await asyncio.gather(*(template.aclose() for template in self.templates.values()))
        await asyncio.to_thread(sweep, self._directory.base)
        await asyncio.to_thread(self._directory.remove)

    def forget(self, sandbox: "LocalSandbox") -> None:
        """Called by a sandbox that has closed."""
        self._sandboxes.discard(sandbox)


class LocalSandbox:
    """A directory and the processes started in it. Made by the driver.

    The path `spec.workdir` does not exist: processes start in the workspace directory itself.
    """

    def __init__(self, sandbox_id: str, spec: SandboxSpec, root: Path, driver: LocalDriver) -> None:
        self._id = sandbox_id
        self._spec = spec
        self._root = root
        self._driver = driver
        self._servers: set[ToolServer] = set()
        self._closing: asyncio.Task[None] | None = None
        root.mkdir(mode=0o700)
        for directory in (root / "work", root / "home", root / "tmp"):
            directory.mkdir(mode=0o700)

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    @property
    def workspace(self) -> Path:
        return self._root / "work"

    @property
    def alive(self) -> bool:
        return self._closing is None

    async def spawn(self, entry: str, *, template: str = "base") -> socket.socket:
        """See `base.Sandbox`. The process runs on the host."""
        if not self.alive:
            raise SandboxError(f"sandbox {self.id} has ended")
        if template not in self._driver.templates:
            raise SandboxError(
                f"no template {template!r}", hint=f"there are: {', '.join(self._driver.templates)}"
            )
        own = {"HOME": str(self._root / "home"), "TMPDIR": str(self._root / "tmp"), MARK: self.id}
        env = {**DEFAULT_ENV, **own, **self._spec.env}
        request = ForkRequest(entry=entry, workdir=str(self.workspace), env=env, isolated=False)
        place = os.open(self.workspace, os.O_PATH | os.O_DIRECTORY)
        try:
            server, sock = await self._driver.templates[template].fork(self.id, place, request)
        finally:
            os.close(place)
        if not self.alive:
            server.process.kill()
            sock.close()
            raise SandboxError(f"sandbox {self.id} has ended")
        self._servers = {held for held in self._servers if held.process.alive} | {server}
        return sock

    async def close(self) -> None:
        """Kill what carries this sandbox's mark and remove its files: see `base.Sandbox`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for server in self._servers:
            server.process.kill()
        for server in self._servers:
            await server.process.wait()
        await asyncio.to_thread(self._kill_marked)
        await asyncio.to_thread(remove_tree, self._root)
        self._driver.forget(self)

    def _kill_marked(self) -> None:
        """Kill until a look around finds none: what is killed may have just forked."""
        while sum(_kill(pid, self.id) for pid in _own_processes()):
            pass


def _refuse_mounts(spec: SandboxSpec) -> None:
    if spec.image is not None:
        raise SandboxError(
            f"the local driver cannot run the image {spec.image}",
            hint="use the bubblewrap driver; `prorl-envs doctor` says what it lacks here",
        )
    for mount in spec.mounts:
        if mount.overlay or str(mount.source) != mount.target:
            raise SandboxError(
                f"the local driver cannot mount {mount.source} at {mount.target}",
                hint="use the bubblewrap driver; `prorl-envs doctor` says what it lacks here",
            )


def _own_processes() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_uid == os.geteuid():
                    yield int(entry.name)


def _kill(pid: int, sandbox_id: str) -> bool:
    """Kill `pid` if it carries the mark. Held by pidfd, so that it is the process that was looked at."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError, PermissionError):
        pidfd = os.pidfd_open(pid)
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"{MARK}={sandbox_id}".encode() in environ:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return True
        finally:
            os.close(pidfd)
    return False
