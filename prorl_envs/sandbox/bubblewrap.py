"""The driver for bubblewrap: namespaces without root, without a daemon, in a few milliseconds."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import PROXY_PORT, SandboxSpec
from prorl_envs.sandbox.command import (
    HOME,
    READY,
    SandboxFiles,
    bwrap_arguments,
    default_environment,
    has_own_names,
    mount_points,
)
from prorl_envs.sandbox.containment import DEFAULT_LIMITS, NodeLimits
from prorl_envs.sandbox.images import ImageUse
from prorl_envs.sandbox.isolated import IsolatedDriver, IsolatedSandbox
from prorl_envs.sandbox.probe import explain, find_bwrap
from prorl_envs.sandbox.processes import Process, not_in_forks, receive
from prorl_envs.sandbox.rootfs import resolve_targets, write_upper
from prorl_envs.sandbox.route import listen_on_host
from prorl_envs.sandbox.snapshot import check_mount_points
from prorl_envs.sandbox.system import write_etc, write_names
from prorl_envs.sandbox.template import TEMPLATES, Template, TemplateSpec
from prorl_envs.sandbox.template_process import ForkRequest

START_TIMEOUT_S = 30.0
#: More than bubblewrap says of the namespaces it made.
_INFO_BYTES = 4096


class BubblewrapDriver(IsolatedDriver["BubblewrapSandbox"]):
    """Starts sandboxes with bubblewrap. They end with this process, however it ends.

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
        #: Makes the processes. One made here stops the loop until it runs its program: 4 to 18 ms on a busy
        #: machine (0052 in docs/decisions).
        self._starter = Template("starter", TemplateSpec(entries=()), nice=limits.nice)
        self._etc: dict[int, asyncio.Task[Path]] = {}

    async def warm(self, *names: str) -> None:
        """Start what runs bubblewrap, and templates: see `NodeDriver`."""
        await asyncio.gather(self._warm_runner(), super().warm(*names))

    async def _warm_runner(self) -> None:
        await self._starter.start()

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
        return await self._starter.bubblewrap(sandbox_id, [str(self.program), *options], streams, info)

    async def _make(self, spec: SandboxSpec) -> "BubblewrapSandbox":
        self.check_network(spec)
        etc = await self._etc_for(spec.uid)
        image = await self.images.acquire(spec.image) if spec.image is not None else None
        sandbox_id, root = self._place()
        files = SandboxFiles(root, etc, None if image is None else image.root)
        return BubblewrapSandbox(sandbox_id, spec, files, self, image)

    async def _release(self) -> None:
        # What still writes into the directory would keep it from being removed.
        await asyncio.gather(*self._etc.values(), return_exceptions=True)
        await self._starter.aclose()
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


class BubblewrapSandbox(IsolatedSandbox):
    """A running sandbox. On the host it is two processes (bubblewrap's, which waits, and the sandbox's first,
    which waits too) and one socket, whose closing ends both even where this service is killed.
    """

    def __init__(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        files: SandboxFiles,
        driver: BubblewrapDriver,
        image: ImageUse | None = None,
    ) -> None:
        super().__init__(sandbox_id, spec, files.root, driver)
        self._driver: BubblewrapDriver = driver
        self._files = files
        self._image = image
        self._lifetime: socket.socket | None = None
        self._monitor: Process | None = None

    async def _launch(self) -> None:
        try:
            self._prepare_files()
        except OSError as error:
            raise SandboxError(f"cannot make a sandbox's directories: {error}") from error
        # A file, not a pipe: should this service be killed, bubblewrap must not die of having no reader, for
        # its child would then wait for its word to go on, forever.
        info = os.memfd_create("namespaces")
        try:
            await self._run(info)
            async with asyncio.timeout(START_TIMEOUT_S):
                output = await self._read_until_ready()
            said = os.pread(info, _INFO_BYTES, 0)
        except TimeoutError:
            raise SandboxError(f"bubblewrap was not ready in {START_TIMEOUT_S} s") from None
        except OSError as error:
            raise SandboxError(f"the sandbox did not start: {error}") from error
        finally:
            os.close(info)
        if not output.endswith(READY):
            raise explain(output.decode(errors="replace"))
        namespaces: dict[str, Any] = json.loads(said)  # whole: it is written before the first process runs
        self._first = _hold_first(namespaces)
        if self._spec.default_route or self._spec.network.allow:
            await self._set_up_network(namespaces)

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
        try:
            netns = os.open(f"/proc/{self._first.pid}/ns/net", os.O_RDONLY)
        except OSError:
            raise self.ended() from None
        try:
            if not self._first.alive:  # or else the pid, and the namespace, may be another's by now
                raise self.ended()
            template = next(iter(self._driver.templates.values()))
            return await template.listen(self.id, netns, 0)
        finally:
            os.close(netns)

    async def _set_up_network(self, info: dict[str, Any]) -> None:
        netns = os.open(f"/proc/{info['child-pid']}/ns/net", os.O_RDONLY)
        try:
            if os.fstat(netns).st_ino != info["net-namespace"]:
                raise SandboxError("the sandbox ended while starting")
            template = next(iter(self._driver.templates.values()))
            if self._spec.default_route:
                await template.route(self.id, netns)
            if allow := self._spec.network.allow:
                listener = await template.listen(self.id, netns, PROXY_PORT)
                self._proxy = self._driver.gateway.serve(self.id, listener, allow)
        finally:
            os.close(netns)

    def _state(self) -> Iterator[str]:
        return (path.name for path in self._files.state(self._spec))

    def _prepare_files(self) -> None:
        self._files.root.mkdir(mode=0o700, exist_ok=self._restored)
        made = () if self._restored else self._files.state(self._spec)
        for directory in (*made, *self._files.scratch(self._spec)):
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

    async def _run(self, info_fd: int) -> None:
        # A socket, not a pipe: from inside, a pipe could be opened again through /proc/1/fd and kept open.
        self._lifetime, inside = socket.socketpair()
        self._lifetime.setblocking(False)
        not_in_forks(self._lifetime)
        masks = self._driver.system_masks if self._image is None else ()
        options = bwrap_arguments(self._inside, self._files, system_masks=masks)
        with inside:
            self._monitor = await self._driver.run(
                self.id, options, inside.fileno(), info_fd, self._files.image
            )

    async def _read_until_ready(self) -> bytes:
        """What bubblewrap and the first process say, up to READY or the end of both."""
        assert self._lifetime is not None
        output = b""
        while not output.endswith(READY) and len(output) < 16384:
            data, _ = await receive(self._lifetime, 4096)
            if not data:
                break
            output += data
        return output

    def _before_end(self) -> None:
        if self._lifetime is not None:
            self._lifetime.shutdown(socket.SHUT_WR)  # a first process still on its way ends when it is there

    async def _release(self) -> None:
        if self._image is not None:
            await self._driver.images.release(self._image)

    async def _end_processes(self) -> None:
        # Tool servers as well: a pid namespace ends only once parents outside it have reaped their children.
        servers = [server.process for server in self._servers]
        first = self._first if self._first is not None else self._monitor
        for process in (*servers, first):
            if process is not None:
                process.kill()
        for process in (*servers, self._first, self._monitor):
            if process is not None:
                await process.wait()
        if self._lifetime is not None:
            while (await receive(self._lifetime, 4096))[0]:  # until nothing holds the other end any more
                pass
            self._lifetime.close()


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
