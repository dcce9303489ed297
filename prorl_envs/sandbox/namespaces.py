"""The driver that makes sandboxes itself: namespaces without root, a daemon or another program, in some
milliseconds. What its sandboxes have in common with those that bubblewrap makes is here as well."""

import asyncio
import contextlib
import os
import pkgutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import PROXY_PORT, Begun, SandboxSpec
from prorl_envs.sandbox.command import (
    HOME,
    TRIAL,
    SandboxFiles,
    default_environment,
    has_own_names,
    mount_options,
    mount_points,
)
from prorl_envs.sandbox.containment import DEFAULT_LIMITS, NodeLimits
from prorl_envs.sandbox.descriptors import pid_of
from prorl_envs.sandbox.images import ImageUse
from prorl_envs.sandbox.isolated import IsolatedDriver, IsolatedSandbox
from prorl_envs.sandbox.making import ENDING_SIZE, Making, Program, Programs
from prorl_envs.sandbox.making_steps import GO
from prorl_envs.sandbox.probe import explain
from prorl_envs.sandbox.processes import Process, not_in_forks, receive
from prorl_envs.sandbox.program import NAME
from prorl_envs.sandbox.rootfs import resolve_targets, write_upper
from prorl_envs.sandbox.route import listen_on_host
from prorl_envs.sandbox.snapshot import check_mount_points
from prorl_envs.sandbox.spares import Spares
from prorl_envs.sandbox.system import write_etc, write_names
from prorl_envs.sandbox.template import TEMPLATES, Template, TemplateSpec
from prorl_envs.sandbox.template_process import ForkRequest

START_TIMEOUT_S = 30.0
#: Says what shell a maker begins. A name only: this room imports no tools.
SHELL = "prorl_envs.tools.born:plan"
#: Descriptors of a shell that was begun.
_BEGUN = 4


class NamespaceDriver(IsolatedDriver["NamespaceSandbox"]):
    """Starts sandboxes by the kernel's own calls. They end with this process, however it ends.

    Args:
        root: see `NodeDriver`.
        templates, limits: see `NodeDriver`.

    Raises:
        SandboxError: no directory can be made.
    """

    name = "namespaces"

    def __init__(
        self,
        root: Path | None = None,
        *,
        templates: Mapping[str, TemplateSpec] = TEMPLATES,
        limits: NodeLimits = DEFAULT_LIMITS,
    ) -> None:
        super().__init__(root, templates=templates, limits=limits)
        #: Starts what makes sandboxes. A process made here stops the loop until it runs its program: 4 to 18
        #: ms on a busy machine (0052 in docs/decisions).
        self.starter = Template("starter", TemplateSpec(entries=()), nice=limits.nice)
        self.programs = Programs()
        self.spares = Spares(self.directory.path)
        self._etc: dict[int, asyncio.Task[Path]] = {}

    async def warm(self, *names: str) -> None:
        """Start what makes sandboxes, and templates: see `NodeDriver`."""
        await asyncio.gather(self._warm_starter(), super().warm(*names))

    async def _warm_starter(self) -> None:
        await self.starter.start()

    def _template(self, name: str, spec: TemplateSpec) -> Template:
        return Template(name, spec, nice=self.nice, filtered=True)

    async def _make(self, spec: SandboxSpec) -> "NamespaceSandbox":
        self.check_network(spec)
        etc = await self._etc_for(spec.uid)
        image = await self.images.acquire(spec.image) if spec.image is not None else None
        sandbox_id, root = self._place()
        files = SandboxFiles(root, etc, None if image is None else image.root)
        return self._sandbox(sandbox_id, spec, files, image)

    def _sandbox(
        self, sandbox_id: str, spec: SandboxSpec, files: SandboxFiles, image: ImageUse | None
    ) -> "NamespaceSandbox":
        return NamespaceSandbox(sandbox_id, spec, files, self, image)

    async def _release(self) -> None:
        # What still writes into the directory would keep it from being removed.
        await asyncio.gather(*self._etc.values(), return_exceptions=True)
        await self.starter.aclose()
        self.programs = Programs()
        await super()._release()

    async def _etc_for(self, uid: int) -> Path:
        """The /etc of that user, written at first use."""
        if uid not in self._etc:
            self._etc[uid] = asyncio.create_task(asyncio.to_thread(self._write_etc, uid))
        written = self._etc[uid]
        return written.result() if written.done() else await asyncio.shield(written)

    def _write_etc(self, uid: int) -> Path:
        path = self.directory.path / f"etc{uid}"
        write_etc(path, uid=uid, home=HOME)
        return path


class NamespaceSandbox(IsolatedSandbox):
    """A running sandbox. On the host it is its first process, which waits, and one socket, whose closing ends
    it even where this service is killed.
    """

    def __init__(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        files: SandboxFiles,
        driver: NamespaceDriver,
        image: ImageUse | None = None,
    ) -> None:
        super().__init__(sandbox_id, spec, files.root, driver)
        self._driver: NamespaceDriver = driver
        self._files = files
        self._image = image
        self._lifetime: socket.socket | None = None
        #: Whether somebody knows where the workspace is, and may have mounted it elsewhere.
        self._shown = False
        self._maker: Process | None = None
        #: To the maker, until somebody has the shell.
        self._way: socket.socket | None = None

    @property
    def maker_pid(self) -> int | None:
        """Of the process that made it, on the host; for operators. None where another program did."""
        return None if self._maker is None else self._maker.pid

    @property
    def workspace(self) -> Path:
        self._shown = True
        return super().workspace

    async def _launch(self) -> None:
        try:
            self._prepare_files()
        except OSError as error:
            raise SandboxError(f"cannot make a sandbox's directories: {error}") from error
        try:
            await self._begin()
        except OSError as error:
            raise SandboxError(f"the sandbox did not start: {error}") from error
        if self._spec.default_route or self._spec.network.allow:
            await self._set_up_network()

    async def _begin(self) -> None:
        """Make the sandbox, up to its first process.

        Raises:
            SandboxError: with what is wrong.
            OSError: this process may have no more descriptors.
        """
        # A socket, not a pipe: from inside, a pipe could be opened again through /proc/1/fd and kept open.
        self._lifetime, inside = socket.socketpair()
        self._lifetime.setblocking(False)
        not_in_forks(self._lifetime)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                with inside:
                    await self._run(inside.fileno())
                await self._await_first()
        except TimeoutError:
            raise SandboxError(f"the sandbox was not ready in {START_TIMEOUT_S} s") from None

    async def _run(self, lifetime: int) -> None:
        """Have it made. It ends when the other end of `lifetime` (a descriptor) is closed."""
        making = self._making()
        try:
            program = self._driver.programs.get(making)
        except ValueError as error:
            raise explain(str(error)) from error
        self._way, its_way = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._way.setblocking(False)
        not_in_forks(self._way)
        own = os.open(self._files.root, os.O_PATH | os.O_DIRECTORY)
        try:
            with its_way:
                fds = [lifetime, its_way.fileno(), own, program.fd]
                self._maker = await self._driver.starter.spawn(self.id, ["", NAME], fds)
        finally:
            os.close(own)
        self.contained.enter(self._maker.pid)
        with contextlib.suppress(BrokenPipeError):  # what ended at once has said why
            self._way.send(GO)
        pidfd = await self._made(self._way, program)
        self._first = Process(pid_of(pidfd), pidfd)

    async def _made(self, way: socket.socket, program: Program) -> int:
        """Wait until the sandbox is made; return the descriptor of its first process.

        Raises:
            SandboxError: with what the kernel refused.
        """
        while True:
            said, fds = await receive(way, ENDING_SIZE, descriptors=1)
            if fds:
                return fds[0]
            if refused := program.refusal(said):
                raise explain(refused)

    def _making(self) -> Making:
        request = self.contained.apply(self._request(""))
        return Making(
            mounts=tuple(self._mounts()),
            files=frozenset(str(mount.source) for mount in self._inside.mounts if not mount.source.is_dir()),
            own=f"{self._files.root}/",
            workdir=request.workdir,
            uid=self._spec.uid,
            hostname=self._spec.hostname,
            network=not self._spec.network.open,
            rlimits=request.rlimits,
            # Its shell may be none, or another machine's.
            trial=TRIAL if self._image is not None else (),
            shell=pkgutil.resolve_name(SHELL)(default_environment(self._spec), self._spec.env),
        )

    async def begin_shell(self) -> Begun | None:
        """See `Sandbox.begin_shell`."""
        self._check_alive()
        way, self._way = self._way, None
        if way is None:
            return None
        try:
            with contextlib.suppress(BrokenPipeError):
                way.send(GO)
            async with asyncio.timeout(START_TIMEOUT_S):
                _, fds = await receive(way, ENDING_SIZE, descriptors=_BEGUN)
        except (OSError, TimeoutError) as error:
            way.close()
            self._check_alive()
            raise SandboxError(f"no shell could be begun: {error}") from error
        except BaseException:
            way.close()
            raise
        if len(fds) != _BEGUN:  # there is no such program
            way.close()
            for fd in fds:
                os.close(fd)
            self._check_alive()
            return None
        terminal, report, process, text = fds
        os.set_blocking(report, False)
        pid, exits = pid_of(process), way.detach()
        return Begun(pid=pid, terminal=terminal, report=report, process=process, text=text, exits=exits)

    async def _await_first(self) -> None:
        """Return once the first process runs. Here it does."""

    def _mounts(self) -> list[str]:
        masks = self._driver.system_masks if self._image is None else ()
        return list(mount_options(self._inside, self._files, system_masks=masks))

    def _open_place(self) -> int:
        assert self._first is not None
        return os.dup(self._first.pidfd)

    def _request(self, entry: str) -> ForkRequest:
        return ForkRequest(
            entry=entry,
            workdir=self._spec.workdir,
            env={**default_environment(self._spec), **self._spec.env},
            host_network=self._spec.network.open,
        )

    async def listen(self) -> socket.socket:
        """See `Sandbox.listen`."""
        if self._first is None or not self.alive:
            raise self.ended()
        if self._spec.network.open:
            return listen_on_host()
        with self._network() as netns:
            return await self._any_template().listen(self.id, netns, 0)

    async def _set_up_network(self) -> None:
        with self._network() as netns:
            if self._spec.default_route:
                await self._any_template().route(self.id, netns)
            if allow := self._spec.network.allow:
                listener = await self._any_template().listen(self.id, netns, PROXY_PORT)
                self._proxy = self._driver.gateway.serve(self.id, listener, allow)

    @contextlib.contextmanager
    def _network(self) -> Iterator[int]:
        """A descriptor of its network namespace.

        Raises:
            SandboxError: it has ended.
        """
        assert self._first is not None
        try:
            netns = os.open(f"/proc/{self._first.pid}/ns/net", os.O_RDONLY)
        except OSError:
            raise self.ended() from None
        try:
            if not self._first.alive:  # or else the pid, and the namespace, may be another's by now
                raise self.ended()
            yield netns
        finally:
            os.close(netns)

    def _any_template(self) -> Template:
        return next(iter(self._driver.templates.values()))

    def _state(self) -> Iterator[str]:
        return (path.name for path in self._files.state(self._spec))

    def _prepare_files(self) -> None:
        if not self._restored:
            self._driver.spares.make(self._files.root, self._files.state(self._spec))
        for directory in self._files.scratch(self._spec):
            directory.mkdir(mode=0o700)
        if has_own_names(self._spec):
            write_names(self._files.root, self._spec.hostname)
        image = self._files.image
        if image is not None:
            self._inside = resolve_targets(image, self._inside)
        if self._restored:
            check_mount_points(self._files.places(self._inside), mount_points(self._inside))
        elif image is not None:
            write_upper(image, self._files.upper, self._inside)

    def _leave_files(self) -> bool:
        return self._driver.spares.take_back(self._files.root, self._kept())

    def _remove_files(self) -> None:
        self._driver.spares.retire(self._files.root, self._kept())

    def _kept(self) -> set[str]:
        """The names of directories that another sandbox may get."""
        files = self._files
        return {path.name for path in (files.tmp, files.home, *(() if self._shown else (files.work,)))}

    def _before_end(self) -> None:
        if self._lifetime is not None:
            self._lifetime.shutdown(socket.SHUT_WR)  # a first process still on its way ends when it is there

    async def _release(self) -> None:
        if self._image is not None:
            await self._driver.images.release(self._image)

    def _processes(self) -> Iterator[Process | None]:
        """Its own on the host, the one whose end ends all others first."""
        yield from (self._first, self._maker)

    async def _end_processes(self) -> None:
        if self._way is not None:
            self._way.close()
        # Tool servers as well: a pid namespace ends only once parents outside it have reaped their children.
        servers = [server.process for server in self._servers]
        own = [process for process in self._processes() if process is not None]
        for process in (*servers, self._first, self._maker):
            if process is not None:
                process.kill()
        for process in (*servers, *own):
            await process.wait()
        if self._lifetime is not None:
            while (await receive(self._lifetime, 4096))[0]:  # until nothing holds the other end any more
                pass
            self._lifetime.close()
