"""Base classes of all drivers and sandboxes: directory, templates, limits and closing.

A driver defines how a sandbox is created (`_make`), launched, joined by a tool server, and stopped.
"""

import asyncio
import contextlib
import dataclasses
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prorl_envs.errors import NoRoom, SandboxError
from prorl_envs.sandbox.base import Sandbox, SandboxLimits, SandboxSpec
from prorl_envs.sandbox.filesystem.directories import (
    DriverDirectory,
    is_full,
    node_local_base,
    remove_tree,
    sweep,
    write_error,
)
from prorl_envs.sandbox.filesystem.disk_usage import DiskUse
from prorl_envs.sandbox.filesystem.mount_plan import check
from prorl_envs.sandbox.limits.enforcement import DEFAULT_LIMITS, EnforcedLimits, LimitEnforcer, NodeLimits
from prorl_envs.sandbox.limits.monitor import memory_of
from prorl_envs.sandbox.linux.descriptors import allow_many, allow_processes, check_room, is_shortage
from prorl_envs.sandbox.template.process import ForkRequest, TemplateProcess, ToolServerProcess
from prorl_envs.sandbox.template.template import TEMPLATES, Template, TemplateSpec


class NodeDriver[S: "NodeSandbox"](ABC):
    """Base class of drivers; fulfils the contract of `base.Driver`. Bound to the event loop of its first use.

    Args:
        root: existing directory on a local disk in which the driver creates its own; None chooses
            `$PRORL_RUN_DIR` or the temporary directory.
        templates: the templates that `Sandbox.spawn` can fork, by name.
        limits: default limits of sandboxes, and how limits are enforced.

    Raises:
        SandboxError: no directory can be created, or the limit of open files or of processes is too low.
    """

    name: str
    takes_checkpoints = False

    def __init__(
        self,
        root: Path | None = None,
        *,
        templates: Mapping[str, TemplateSpec] = TEMPLATES,
        limits: NodeLimits = DEFAULT_LIMITS,
    ) -> None:
        allow_many()
        allow_processes()
        self.directory = DriverDirectory(node_local_base(root))
        self.nice = limits.nice
        self.templates = {name: self._template(name, spec) for name, spec in templates.items()}
        self.limit_enforcer = LimitEnforcer(limits, self.directory)
        self._sandboxes: set[S] = set()
        self._sweeping: asyncio.Task[list[Path]] | None = None
        self._started = 0
        self._closing: asyncio.Task[None] | None = None

    async def start(self, spec: SandboxSpec) -> S:
        """Start a sandbox and return it once its first process runs: see `base.Driver`.

        Raises:
            SandboxError: with the runtime's error message and a remedy as hint; see `NoRoom`.
        """
        try:
            try:
                return await self._start(spec)
            except SandboxError as error:
                if not await self.relieve(error):
                    if self._sandboxes and is_shortage(error):
                        raise NoRoom(error.message, hint=error.hint) from error
                    raise
            return await self._start(spec)
        except OSError as error:
            if not is_full(error):
                raise
            raise write_error(error) from error

    async def _start(self, spec: SandboxSpec) -> S:
        self._check_open()
        check_room(len(self._sandboxes))
        spec = self.limit_enforcer.complete(spec)
        if spec.emulate_root:
            spec = dataclasses.replace(spec, uid=0)
        check(spec)
        if spec.checkpoint is not None and not self.takes_checkpoints:
            raise SandboxError(
                f"the {self.name} driver takes no checkpoints", hint="use the driver bubblewrap"
            )
        self._sweep()
        sandbox = await self._make(spec)
        self._check_open()  # if the driver was closed meanwhile, its `aclose` frees the resources
        self._sandboxes.add(sandbox)
        try:
            await self.limit_enforcer.prepare(sandbox)
            await sandbox.launch()
            self.limit_enforcer.watch(sandbox)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def relieve(self, error: BaseException) -> bool:
        """Kill a sandbox to free a kernel counter that sandboxes share, if `error` may come from a full one.

        Returns:
            True if a sandbox was killed (and has closed), so that another attempt may succeed.
        """
        killed = await self.limit_enforcer.relieve(error)
        for sandbox in self.sandboxes:
            if sandbox is killed:
                await sandbox.close()
        return killed is not None

    @property
    def enforced_limits(self) -> frozenset[str]:
        """The fields of `SandboxLimits` that are enforced here.

        Raises:
            SandboxError: the requested mechanism is not available.
        """
        names = {field.name for field in dataclasses.fields(SandboxLimits)}
        return frozenset(names if self.limit_enforcer.enforces_cpu_limit else names - {"cpus"})

    async def image_env(self, image: Path) -> dict[str, str]:
        """Return the variables that an image sets for itself, for `SandboxSpec.env`: see `read_image_env`.

        Args:
            image: as in `SandboxSpec.image`.

        Raises:
            SandboxError: there is no such image, or it cannot be read.
        """
        return {}

    @property
    def sandboxes(self) -> frozenset[S]:
        """The sandboxes that are not closed yet."""
        return frozenset(self._sandboxes)

    async def warm(self, *names: str) -> None:
        """Start templates before their first use; without names, all of them.

        Raises:
            SandboxError: a template does not start.
        """
        await asyncio.gather(*(self.templates[name].start() for name in names or self.templates))

    async def aclose(self) -> None:
        """Close all open sandboxes, stop the templates and remove the driver's directory.

        Idempotent. Continues if the caller is cancelled.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._aclose())
        await asyncio.shield(self._closing)

    def forget(self, sandbox: S) -> None:
        """Drop a sandbox that has closed. Called by the sandbox."""
        self.limit_enforcer.forget(sandbox)
        self._sandboxes.discard(sandbox)

    def _template(self, name: str, spec: TemplateSpec) -> Template:
        return Template(name, spec, nice=self.nice)

    @abstractmethod
    async def _make(self, spec: SandboxSpec) -> S:
        """Prepare everything before the launch; `_place` gives the path of the sandbox's directory."""

    async def _release(self) -> None:  # noqa: B027 - most drivers have no resources
        """Release the driver's own resources, once all sandboxes are closed."""

    def _place(self) -> tuple[str, Path]:
        """Return the id of the next sandbox, unique on this node, and the path for its directory."""
        self._started += 1
        path = self.directory.path / str(self._started)
        return f"{self.directory.id}-{self._started}", path

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxError("the driver is closed")

    def _sweep(self) -> asyncio.Task[list[Path]]:
        """Remove the leftovers of killed services, once, in a background task: there may be many files."""
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(asyncio.to_thread(sweep, self.directory.base))
        return self._sweeping

    async def _aclose(self) -> None:
        await self._sweep()
        closing = (sandbox.close() for sandbox in tuple(self._sandboxes))
        outcomes = await asyncio.gather(*closing, return_exceptions=True)
        await self.limit_enforcer.aclose()
        await asyncio.gather(*(template.aclose() for template in self.templates.values()))
        await self._release()
        await asyncio.to_thread(self.directory.remove)
        for outcome in outcomes:  # last: a sandbox that fails to close must not block the rest
            if outcome is not None:
                raise outcome


class NodeSandbox(Sandbox):
    """Base class of sandboxes on this node. Created by a driver.

    Args:
        sandbox_id: unique on this node.
        spec: the requested spec.
        root: the sandbox's own directory on the host; removed when the sandbox closes.
        driver: the driver that created it.
    """

    #: True if the sandbox has its own user namespace, which the process that measures its files must enter.
    _own_users = True

    def __init__(self, sandbox_id: str, spec: SandboxSpec, root: Path, driver: NodeDriver[Any]) -> None:
        self._id = sandbox_id
        self._spec = spec
        self._root = root
        self._driver = driver
        self._servers: set[ToolServerProcess] = set()
        self._why: SandboxError | None = None
        #: The enforced limits; filled by the driver's `LimitEnforcer` before the launch.
        self.enforced = EnforcedLimits()
        self._closing: asyncio.Task[None] | None = None
        #: Path of the workspace below the sandbox's directory; None if it is a directory of the image.
        self._work: str | None = "work"

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    @property
    def workspace(self) -> Path:
        if self._work is None:
            raise SandboxError(
                f"no directory of the host has all files of {self._spec.workdir}: some are in the image",
                hint="read and write its files with the tools of the sandbox",
            )
        return self._root / self._work

    @property
    def alive(self) -> bool:
        return self._closing is None

    @property
    def first_pid(self) -> int | None:
        """Host pid of the first process; None without a pid namespace, or before the launch."""
        return None

    @property
    def seen_root(self) -> str | None:
        """Host path of the sandbox's root directory; None if the sandbox has no root of its own."""
        return None if self.first_pid is None else f"/proc/{self.first_pid}/root"

    @property
    def servers_inside(self) -> frozenset[int]:
        """Pids of the tool servers that run in the sandbox's pid namespace, as seen there."""
        return frozenset()

    def end_error(self) -> SandboxError:
        """See `base.Sandbox`."""
        return self._why or super().end_error()

    def pop_notices(self) -> list[str]:
        """See `base.Sandbox`."""
        return self.enforced.pop_notices()

    def memory(self) -> int | None:
        """See `base.Sandbox`."""
        watch = self.enforced.watch
        return None if watch is None or not self.alive else memory_of(watch)

    def end(self, why: SandboxError) -> None:
        """Close the sandbox; its users receive `why` as the error. Called by the watchdog."""
        self._why = why
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    async def measure_disk(self, *, size: int, files: int) -> DiskUse:
        """Measure the sandbox's files on disk: see `TemplateProcess.measure`."""
        total = DiskUse(0, 0)
        for tree in self._trees:
            self._check_alive()
            with contextlib.ExitStack() as opened:
                try:
                    fds = [os.open(tree, os.O_RDONLY | os.O_DIRECTORY)]
                except FileNotFoundError:  # a checkpoint has merged it with others
                    continue
                opened.callback(os.close, fds[0])
                if self._own_users:
                    fds.append(self._open_namespaces())
                    opened.callback(os.close, fds[1])
                total += await (await self._template()).measure(fds, size=size, files=files)
        return total

    @property
    def _trees(self) -> list[Path]:
        """The directories on the host with its files."""
        return [self._root]

    @property
    def tool_servers(self) -> list[int]:
        """Host pids of the running tool servers; for operators."""
        return [server.process.pid for server in self._servers if server.process.alive]

    @abstractmethod
    async def launch(self) -> None:
        """Create the directories and start the first process. Called once, by the driver."""

    async def spawn(self, entry: str, *, template: str = "base") -> socket.socket:
        """Fork a process from a template into this sandbox and run `entry` there: see `base.Sandbox`.

        The returned socket is non-blocking.
        """
        self._check_alive()
        templates = self._driver.templates
        if template not in templates:
            raise SandboxError(f"no template {template!r}", hint=f"the templates are: {', '.join(templates)}")
        if entry not in (entries := templates[template].spec.entries):
            raise SandboxError(
                f"template {template!r} has no entry {entry!r}", hint=f"it has: {', '.join(entries)}"
            )
        request = self.enforced.apply(self._request(entry))
        try:
            server, sock = await self._fork_inside(template, request)
        except (SandboxError, OSError) as error:
            if not await self._driver.relieve(error):
                raise
            self._check_alive()  # the killed sandbox may be this one
            server, sock = await self._fork_inside(template, request)
        try:
            self._check_alive()
        except SandboxError:
            server.process.kill()
            sock.close()
            raise
        self._servers = {other for other in self._servers if other.process.alive} | {server}
        return sock

    async def _fork_inside(
        self, template: str, request: ForkRequest
    ) -> tuple[ToolServerProcess, socket.socket]:
        # A duplicate, because the sandbox may close meanwhile, and the descriptor's number may be reused.
        namespaces = self._open_namespaces()
        try:
            return await self._fork(template, namespaces, request)
        finally:
            os.close(namespaces)

    async def _fork(
        self, template: str, namespaces: int, request: ForkRequest
    ) -> tuple[ToolServerProcess, socket.socket]:
        """Fork a tool server: see `TemplateProcess.fork`."""
        process = await self._driver.templates[template].start()
        return await process.fork(self.id, namespaces, request)

    async def _template(self) -> TemplateProcess:
        """Return a template for steps that need no tools."""
        return await next(iter(self._driver.templates.values())).start()

    async def take_layer(self, target: Path) -> None:
        """See `base.Sandbox`. Most drivers do not store the changes to an image in a directory."""
        raise SandboxError(
            f"the {self._driver.name} driver cannot make a layer of a sandbox",
            hint="use the driver bubblewrap or apptainer",
        )

    async def close(self) -> None:
        """Kill all processes in the sandbox and remove its files.

        Idempotent. Continues if the caller is cancelled; the driver's `aclose` then waits for the end.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    @abstractmethod
    def _open_namespaces(self) -> int:
        """Return a new descriptor of the namespaces that a tool server enters: see `TemplateProcess.fork`."""

    @abstractmethod
    def _request(self, entry: str) -> ForkRequest: ...

    @abstractmethod
    async def _end(self) -> None:
        """Kill every process of the sandbox, tool servers included."""

    async def _release(self) -> None:
        """Release the sandbox's resources, once its processes and files are gone."""

    def _remove_files(self) -> None:
        """Remove the sandbox's directory, if it still exists. Called in a thread."""
        remove_tree(self._root)

    async def _close(self) -> None:
        await self._end()
        await self.enforced.release()
        await asyncio.to_thread(self._remove_files)
        await self._release()
        self._driver.forget(self)

    def _check_alive(self) -> None:
        if not self.alive:
            raise self.end_error()
