"""Driver for machines without user namespaces: one Apptainer per sandbox, with the tool servers inside.

If Apptainer is installed setuid and the kernel allows ordinary users no user namespaces, no process can join
a sandbox from outside. So the first process of a sandbox is itself a template: a Python of the host's that is
mounted into any image, and forks tool servers on request over an inherited socket. As the first process of a
pid namespace, it receives no signal from inside; when its socket closes, it exits, and the sandbox stops.
"""

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.apptainer_probe import find_apptainer, uses_setuid
from prorl_envs.sandbox.drivers.apptainer_wrapper import wrapper_environment
from prorl_envs.sandbox.drivers.instance.command import (
    InstanceFiles,
    apptainer_command,
    explain_instance,
    explain_shared,
    write_points,
    write_system,
)
from prorl_envs.sandbox.drivers.instance.runtime import CODE, Runtime, copy_runtime
from prorl_envs.sandbox.drivers.isolated import IsolatedDriver, IsolatedSandbox
from prorl_envs.sandbox.filesystem.directories import write_error
from prorl_envs.sandbox.filesystem.host_system import write_etc, write_names
from prorl_envs.sandbox.filesystem.mount_plan import HOME, default_environment, shared_memory_bytes
from prorl_envs.sandbox.filesystem.sif import system_partition
from prorl_envs.sandbox.filesystem.sif_mounts import mount_places
from prorl_envs.sandbox.filesystem.tree_copy import copy_files
from prorl_envs.sandbox.limits.enforcement import DEFAULT_LIMITS, NodeLimits
from prorl_envs.sandbox.linux.descriptors import pid_of
from prorl_envs.sandbox.linux.kernel_settings import namespace_settings
from prorl_envs.sandbox.linux.pidfd import Process
from prorl_envs.sandbox.template.process import (
    ForkRequest,
    Inside,
    TemplateProcess,
    ToolServerProcess,
    Wrapper,
    environment,
)
from prorl_envs.sandbox.template.template import TEMPLATES, TemplateSpec

#: Preload of a Python session inside the sandbox. Libraries are not preloaded: their import in advance would
#: delay every sandbox by seconds.
_PYTHON_PRELOAD = "prorl_envs.tools.server.python_kernel:prepare_alone"
_PYTHON = "ipython"


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedFiles:
    """The files and settings that all sandboxes of a driver share."""

    runtime: Runtime
    etc: Path
    empty: Path
    blank: Path
    setuid: bool


class InstanceDriver(IsolatedDriver["InstanceSandbox"]):
    """Starts each sandbox with its own Apptainer. Sandboxes stop with this process, even if it is killed.

    Args:
        root: see `NodeDriver`.
        apptainer: the program; None chooses as `ApptainerDriver` does.
        setuid: whether to use its setuid program; None: if it is installed and this user is not root.
        templates, limits: see `NodeDriver`.

    Raises:
        SandboxError: there is no Apptainer, or no directory can be created.
    """

    name = "apptainer-instance"

    def __init__(
        self,
        root: Path | None = None,
        *,
        apptainer: Path | None = None,
        setuid: bool | None = None,
        templates: Mapping[str, TemplateSpec] = TEMPLATES,
        limits: NodeLimits = DEFAULT_LIMITS,
    ) -> None:
        self.program = find_apptainer(apptainer)
        super().__init__(root, templates=templates, limits=limits)
        self._setuid = setuid
        self._preparing: asyncio.Task[_SharedFiles] | None = None

    async def warm(self, *names: str) -> None:
        """Prepare the files that sandboxes share, and start the template that measures disk use."""
        await asyncio.gather(self.shared(), super().warm(next(iter(self.templates))))

    async def shared(self) -> _SharedFiles:
        """Return the files that all sandboxes share; the first call creates them.

        Raises:
            SandboxError: they cannot be created.
        """
        if self._preparing is None:
            self._preparing = asyncio.create_task(asyncio.to_thread(self._prepare))
        try:
            return await asyncio.shield(self._preparing)
        except SandboxError:
            self._preparing = None  # the next call tries again
            raise

    async def _make(self, spec: SandboxSpec) -> "InstanceSandbox":
        shared = await self.shared()
        if spec.default_route and os.geteuid() != 0:
            raise SandboxError(
                "the apptainer-instance driver cannot give a sandbox a default route: that needs root",
                hint="start it without `default_route`; connections to outside addresses then fail at once",
            )
        self.check_network(spec)
        if spec.image is not None and not await asyncio.to_thread(spec.image.is_dir):
            await asyncio.to_thread(system_partition, spec.image)  # raises if it is not an image
        sandbox_id, root = self._place()
        files = InstanceFiles(
            root, shared.etc, runtime=shared.runtime.path, empty=shared.empty, blank=shared.blank
        )
        return InstanceSandbox(sandbox_id, spec, files, self, shared)

    async def _release(self) -> None:
        if self._preparing is not None:
            await asyncio.gather(self._preparing, return_exceptions=True)
        await super()._release()

    def _prepare(self) -> _SharedFiles:
        path = self.directory.path
        attempt = sum(1 for _ in path.glob("shared*"))
        shared = path / f"shared{attempt}"
        try:
            (shared / "notes").mkdir(parents=True)
            (shared / "empty").mkdir(mode=0o555)
            (shared / "blank").touch(mode=0o444)
            write_etc(shared / "etc", uid=os.geteuid(), home=HOME)
        except OSError as error:
            raise write_error(error) from error
        runtime = copy_runtime(shared / "runtime", self.templates_specs)
        setuid = uses_setuid(self.program) if self._setuid is None else self._setuid
        return _SharedFiles(
            runtime=runtime,
            etc=shared / "etc",
            empty=shared / "empty",
            blank=shared / "blank",
            setuid=setuid,
        )

    @property
    def templates_specs(self) -> dict[str, TemplateSpec]:
        """The specs of the templates that can be forked inside, by name."""
        return {name: template.spec for name, template in self.templates.items()}

    def wrapper(self, command: list[str], python: tuple[str, ...]) -> Wrapper:
        """Return the wrapper with which Apptainer runs the first process."""
        notes = self.directory.path / "notes"
        return Wrapper(
            command=tuple(command),
            env=wrapper_environment(notes, environment()),
            explain=explain_instance,
            python=python,
        )


class InstanceSandbox(IsolatedSandbox):
    """A running sandbox. On the host it consists of Apptainer's own process, which waits, and the sandbox's
    first process, which forks tool servers. Both exit when the first process's control socket closes.
    """

    _own_users = False

    def __init__(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        files: InstanceFiles,
        driver: InstanceDriver,
        shared: _SharedFiles,
    ) -> None:
        super().__init__(sandbox_id, spec, files.root, driver)
        self._driver: InstanceDriver = driver
        self._files = files
        self._shared = shared
        self._process: TemplateProcess | None = None
        self._root_fd = -1
        self._stop_copying = threading.Event()

    @property
    def seen_root(self) -> str | None:
        # The first process sent this descriptor, because this user cannot open its /proc directory.
        return None if self._root_fd < 0 else f"/proc/self/fd/{self._root_fd}"

    @property
    def servers_inside(self) -> frozenset[int]:
        return frozenset(server.inner_pid for server in self._servers if server.process.alive)

    async def _launch(self) -> None:
        try:
            copied = await self._prepare_files()
        except OSError as error:
            raise SandboxError(f"cannot make a sandbox's directories: {error}") from error
        command = apptainer_command(
            self._driver.program,
            self._inside,
            self._files,
            setuid=self._shared.setuid,
            root=os.geteuid() == 0,
            system_masks=self._driver.system_masks if self._spec.image is None else (),
            copied=copied,
            host_mounts=mount_places(),
        )
        runtime, with_python = self._shared.runtime, shows_python(self._spec)
        python = runtime.command_of_host() if with_python else runtime.command()
        try:
            self._process = TemplateProcess(
                "inside", self._driver.nice, self._driver.wrapper(command, python)
            )
        except OSError as error:
            raise SandboxError(f"Apptainer cannot be run: {error}") from error
        entries, preload = self._imports(with_python)
        inside = Inside(
            code=CODE,
            route=self._spec.default_route,
            settings=namespace_settings(shared_memory_bytes(self._spec)),
        )
        await self._process.prepare(entries, preload, inside)
        self._take_first(self._process)
        await self._start_proxy()

    async def open_socket(self, *, netlink: bool = False) -> socket.socket:
        """See `IsolatedSandbox.open_socket`."""
        if self._process is None or not self.alive:
            raise self.end_error()
        if self._spec.network.open:
            return socket.socket()
        return await self._process.open_socket(self._root_fd, netlink=netlink)

    def _imports(self, with_python: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the first process's entries, and the modules that it imports in advance."""
        templates = self._driver.templates_specs
        entries = tuple(dict.fromkeys(entry for spec in templates.values() for entry in spec.entries))
        if not with_python:
            return entries, self._shared.runtime.modules
        preload = (_PYTHON_PRELOAD,) if _PYTHON in templates else ()
        return entries, (*self._shared.runtime.modules, *preload)

    def _take_first(self, process: TemplateProcess) -> None:
        """Take the descriptors of the first process, and check the namespaces that Apptainer created.

        A site can forbid namespaces; Apptainer then only prints a warning.
        """
        pidfd, self._root_fd = process.descriptors
        self._first = Process(pid_of(pidfd), pidfd)
        found = process.found
        open_network = self._spec.network.open
        shared = [
            name
            for name, number in found["namespaces"].items()
            if number == os.stat(f"/proc/self/ns/{name}").st_ino and not (name == "net" and open_network)  # noqa: PTH116
        ]
        if found["pid"] != 1 and "pid" not in shared:
            shared.append("pid")
        if shared:
            raise explain_shared(shared)

    async def _prepare_files(self) -> dict[int, Path]:
        """Create the directories. Return the copies of overlay mounts, by their index in the spec."""
        files, spec = self._files, self._inside
        for directory in (files.root, files.work, files.tmp, files.home):
            directory.mkdir(mode=0o700)
        overlays = {index: files.overlay(index)[0] for index, m in enumerate(spec.mounts) if m.overlay}
        for index, copy in overlays.items():
            # An overlay of one directory needs privileges; a private copy has the same effect.
            source = spec.mounts[index].source
            if not await asyncio.to_thread(source.is_dir):
                raise SandboxError(f"the overlay's source {source} is not a directory")
            await copy_files(source, copy, self._stop_copying)
        write_names(files.root, spec.hostname, spec.hosts)
        if spec.image is None:
            write_system(spec, files)
        else:
            write_points(spec, files.places(spec))
        return overlays

    def _open_namespaces(self) -> int:
        return os.dup(self._root_fd)

    def _request(self, entry: str) -> ForkRequest:
        env = {**default_environment(self._spec), **self._spec.env}
        return ForkRequest(entry=entry, workdir=self._spec.workdir, env=env, isolated=False)

    async def _fork(
        self, template: str, namespaces: int, request: ForkRequest
    ) -> tuple[ToolServerProcess, socket.socket]:
        assert self._process is not None
        if template == _PYTHON and not shows_python(self._spec):
            raise SandboxError(
                "a session of the host's Python needs that Python in the sandbox",
                hint="add the mounts of `python_runtime()` to the spec, as the ipython environments do",
            )
        return await self._process.fork(self.id, namespaces, request)

    async def _end_processes(self) -> None:
        self._stop_copying.set()
        if self._first is not None:
            self._first.kill()  # the kernel then kills its whole pid namespace
        if self._process is not None:
            await self._process.aclose()
        if self._first is not None:
            await self._first.wait()
        for server in self._servers:
            await server.process.wait()
        if self._root_fd >= 0:
            os.close(self._root_fd)
            self._root_fd = -1


def shows_python(spec: SandboxSpec) -> bool:
    """Return True if this interpreter and its packages are mounted in the sandbox at their own paths."""
    needed = [Path(sys.executable), *(Path(path) for path in sys.path if "-packages" in path)]
    places = [mount.target for mount in spec.mounts if str(mount.source) == mount.target]
    return all(any(path.is_relative_to(place) for place in places) for path in needed)
