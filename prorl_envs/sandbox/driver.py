"""What all drivers have in common: a directory, templates, sandboxes that are closed in the end.

A driver adds how a sandbox is made (`_make`), launched, reached by a tool server, and ended.
"""

import asyncio
import contextlib
import dataclasses
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Begun, Limits, SandboxSpec
from prorl_envs.sandbox.command import check
from prorl_envs.sandbox.containment import DEFAULT_LIMITS, Contained, Containment, NodeLimits
from prorl_envs.sandbox.descriptors import allow_many, check_room
from prorl_envs.sandbox.disk import DiskUse
from prorl_envs.sandbox.files import DriverDirectory, node_local_base, remove_tree, sweep
from prorl_envs.sandbox.mounted import sweep_mounts
from prorl_envs.sandbox.snapshot import Snapshot, copy_trees
from prorl_envs.sandbox.template import TEMPLATES, Template, TemplateSpec
from prorl_envs.sandbox.template_process import ForkRequest, ToolServer
from prorl_envs.sandbox.watch import memory_of


class NodeDriver[S: "NodeSandbox"](ABC):
    """Keeps the contract of `base.Driver`. Belongs to the event loop in which it is first used.

    Args:
        root: existing directory on a local disk under which the driver makes its own; None chooses
            `$PRORL_RUN_DIR` or the temporary directory.
        templates: what `Sandbox.spawn` can fork, by name.
        limits: of sandboxes that ask for none of their own, and how they are kept.

    Raises:
        SandboxError: no directory can be made, or too few files can be opened.
    """

    name: str

    def __init__(
        self,
        root: Path | None = None,
        *,
        templates: Mapping[str, TemplateSpec] = TEMPLATES,
        limits: NodeLimits = DEFAULT_LIMITS,
    ) -> None:
        allow_many()
        self.directory = DriverDirectory(root.resolve() if root is not None else node_local_base())
        self.nice = limits.nice
        self.templates = {name: self._template(name, spec) for name, spec in templates.items()}
        self.containment = Containment(limits, self.directory)
        self._sandboxes: set[S] = set()
        self._sweeping: asyncio.Task[list[Path]] | None = None
        self._started = self._snapshots = 0
        self._closing: asyncio.Task[None] | None = None

    async def start(self, spec: SandboxSpec, *, snapshot: Snapshot | None = None) -> S:
        """Start a sandbox and return it once its first process runs: see `base.Driver`.

        Raises:
            SandboxError: with the runtime's own words and a remedy as hint.
        """
        self._check_open()
        check_room()
        spec = self.containment.complete(spec)
        check(spec)
        if snapshot is not None:
            snapshot.check(spec)
        self._sweep()
        sandbox = await self._make(spec)
        self._check_open()  # meanwhile; what was acquired for it is given back with the driver
        self._sandboxes.add(sandbox)
        try:
            if snapshot is not None:
                await sandbox.restore(snapshot)
            await self.containment.prepare(sandbox)
            await sandbox.launch()
            self.containment.watch(sandbox)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    @property
    def kept(self) -> frozenset[str]:
        """The fields of `Limits` that are kept here.

        Raises:
            SandboxError: the mechanism asked for cannot be had.
        """
        known = {field.name for field in dataclasses.fields(Limits)}
        return frozenset(known if self.containment.keeps_cpus else known - {"cpus"})

    async def image_env(self, image: Path) -> dict[str, str]:
        """The variables that an image sets for itself, for `SandboxSpec.env`: see `image_env`.

        Args:
            image: as in `SandboxSpec.image`.

        Raises:
            SandboxError: there is no such image, or it cannot be read.
        """
        return {}

    @property
    def sandboxes(self) -> frozenset[S]:
        """Those not yet closed."""
        return frozenset(self._sandboxes)

    async def warm(self, *names: str) -> None:
        """Start templates ahead of their first use; all of them where none is named.

        Raises:
            SandboxError: one does not start.
        """
        await asyncio.gather(*(self.templates[name].start() for name in names or self.templates))

    async def aclose(self) -> None:
        """Close every sandbox still open, end the templates, remove the driver's directory.

        Idempotent. Goes on where the caller is cancelled.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._aclose())
        await asyncio.shield(self._closing)

    def forget(self, sandbox: S) -> None:
        """Called by a sandbox that has closed."""
        self.containment.forget(sandbox)
        self._sandboxes.discard(sandbox)

    def _template(self, name: str, spec: TemplateSpec) -> Template:
        return Template(name, spec, nice=self.nice)

    @abstractmethod
    async def _make(self, spec: SandboxSpec) -> S:
        """Everything that comes before the launch; the directory comes from `_place`."""

    async def _release(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what the driver holds itself, once no sandbox is left."""

    def _place(self) -> tuple[str, Path]:
        """The id of the next sandbox, unique on this node, and its directory, not made yet."""
        self._started += 1
        path = self.directory.path / str(self._started)
        return f"{self.directory.id}-{self._started}", path

    def snapshot_place(self) -> Path:
        """The directory of the next snapshot, not made yet."""
        self._snapshots += 1
        return self.directory.path / f"snapshot{self._snapshots}"

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxError("the driver is closed")

    def _sweep(self) -> asyncio.Task[list[Path]]:
        """Remove what killed services left, once, beside everything else: it may be much."""
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(asyncio.to_thread(_sweep, self.directory.base))
        return self._sweeping

    async def _aclose(self) -> None:
        await self._sweep()
        closing = (sandbox.close() for sandbox in tuple(self._sandboxes))
        outcomes = await asyncio.gather(*closing, return_exceptions=True)
        await self.containment.aclose()
        await asyncio.gather(*(template.aclose() for template in self.templates.values()))
        await self._release()
        await asyncio.to_thread(self.directory.remove)
        for outcome in outcomes:  # only now: one that does not close must not keep the rest
            if outcome is not None:
                raise outcome


class NodeSandbox(ABC):
    """Keeps the contract of `base.Sandbox`. Made by a driver.

    Args:
        sandbox_id: unique on this node.
        spec: what was asked for.
        root: the sandbox's own directory on the host; removed at its end.
        driver: whose it is.
    """

    #: Whether it has a user namespace of its own, to be entered by who measures its files.
    _own_users = True

    def __init__(self, sandbox_id: str, spec: SandboxSpec, root: Path, driver: NodeDriver[Any]) -> None:
        self._id = sandbox_id
        self._spec = spec
        self._root = root
        self._driver = driver
        self._servers: set[ToolServer] = set()
        self._why: SandboxError | None = None
        #: What keeps its limits; set by the driver's containment before the launch.
        self.contained = Contained()
        self._closing: asyncio.Task[None] | None = None
        self._copying = asyncio.Lock()
        self._stop_copying = threading.Event()
        self._restored = False

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

    @property
    def first_pid(self) -> int | None:
        """Its first process on the host; None where it has no pid namespace, or has not begun."""
        return None

    @property
    def seen_root(self) -> str | None:
        """By which path the host sees its root directory; None where it has none of its own."""
        return None if self.first_pid is None else f"/proc/{self.first_pid}/root"

    @property
    def servers_inside(self) -> frozenset[int]:
        """The numbers, inside, of tool servers that run in its pid namespace."""
        return frozenset()

    def ended(self) -> SandboxError:
        """See `base.Sandbox`."""
        return self._why or SandboxError(f"sandbox {self.id} has ended")

    def take_notices(self) -> list[str]:
        """See `base.Sandbox`."""
        return self.contained.take_notices()

    def memory(self) -> int | None:
        """See `base.Sandbox`."""
        watch = self.contained.watch
        return None if watch is None or not self.alive else memory_of(watch)

    def end(self, why: SandboxError) -> None:
        """Have it closed, for a reason that whoever uses it is told. Called by the watchdog."""
        self._why = why
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    async def measure_disk(self, *, size: int, files: int) -> DiskUse:
        """What it has on disk: see `Template.measure`."""
        self._check_alive()
        with contextlib.ExitStack() as opened:
            fds = [os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)]
            opened.callback(os.close, fds[0])
            if self._own_users:
                fds.append(self._open_place())
                opened.callback(os.close, fds[1])
            template = next(iter(self._driver.templates.values()))
            return await template.measure(self.id, fds, size=size, files=files)

    @property
    def tool_servers(self) -> list[int]:
        """The pids, on the host, of the tool servers that run; for operators."""
        return [server.process.pid for server in self._servers if server.process.alive]

    @abstractmethod
    async def launch(self) -> None:
        """Make the directories and start the first process. Called once, by the driver."""

    async def spawn(self, entry: str, *, template: str = "base") -> socket.socket:
        """Fork a process from a template into this sandbox and run `entry` there: see `base.Sandbox`.

        The returned socket is non-blocking.
        """
        self._check_alive()
        if template not in self._driver.templates:
            raise SandboxError(
                f"no template {template!r}", hint=f"there are: {', '.join(self._driver.templates)}"
            )
        # A descriptor of our own: should the sandbox end meanwhile, its number may become another's.
        place = self._open_place()
        try:
            request = self.contained.apply(self._request(entry))
            server, sock = await self._fork(template, place, request)
        finally:
            os.close(place)
        try:
            self._check_alive()
        except SandboxError:
            server.process.kill()
            sock.close()
            raise
        self._servers = {held for held in self._servers if held.process.alive} | {server}
        return sock

    async def _fork(
        self, template: str, place: int, request: ForkRequest
    ) -> tuple[ToolServer, socket.socket]:
        """Fork a tool server: see `Template.fork`."""
        return await self._driver.templates[template].fork(self.id, place, request)

    async def begin_shell(self) -> Begun | None:
        """See `base.Sandbox`. Most begin none."""
        return None

    async def snapshot(self) -> Snapshot:
        """Copy the files of the sandbox, which goes on: see `base.Sandbox`."""
        async with self._copying:
            self._check_alive()
            path = self._driver.snapshot_place()
            try:
                copied = await copy_trees(self._root, path, self._state(), self._stop_copying)
            except BaseException:
                if self._closing is None:  # a caller that was cancelled stopped this copy, and not the next
                    self._stop_copying.clear()
                await asyncio.shield(asyncio.to_thread(remove_tree, path))
                raise
            return Snapshot(self._spec, path, copied)

    async def restore(self, snapshot: Snapshot) -> None:
        """Copy the files of a snapshot in, before the launch. Called by the driver.

        Raises:
            SandboxError: they cannot be copied.
        """
        async with self._copying:
            await copy_trees(snapshot.path, self._root, self._state(), self._stop_copying)
        self._restored = True

    async def close(self) -> None:
        """End everything in the sandbox and remove its files.

        Idempotent. Goes on where the caller is cancelled; the driver's `aclose` then waits for it.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    def _state(self) -> Iterator[str]:
        """The names, below the sandbox's directory, of those that hold its files."""
        yield from ("work", "home", "tmp")

    @abstractmethod
    def _open_place(self) -> int:
        """A new descriptor of what a tool server joins: see `join.join`."""

    @abstractmethod
    def _request(self, entry: str) -> ForkRequest: ...

    @abstractmethod
    async def _end(self) -> None:
        """End every process of the sandbox, tool servers included."""

    async def _release(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what the sandbox used, once it has ended and its files are gone."""

    def _leave_files(self) -> bool:
        """Whether its directory is gone already, since that takes no time. Called once nothing runs in it."""
        return False

    def _remove_files(self) -> None:
        """Remove its directory, where it is still there. Called in a thread."""
        remove_tree(self._root)

    async def _close(self) -> None:
        self._stop_copying.set()
        async with self._copying:
            await self._end()
        await self.contained.release()
        if not self._leave_files():
            await asyncio.to_thread(self._remove_files)
        await self._release()
        self._driver.forget(self)

    def _check_alive(self) -> None:
        if not self.alive:
            raise self.ended()


def _sweep(base: Path) -> list[Path]:
    return sweep(base) + sweep_mounts(base)
