"""Base classes of drivers that isolate by namespaces: images, masks, networks, and a first process whose
exit kills all others inside."""

import asyncio
import logging
import socket
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import PROXY_PORT, Mount, SandboxSpec
from prorl_envs.sandbox.drivers.base import NodeDriver, NodeSandbox
from prorl_envs.sandbox.filesystem.image_env import read_image_env
from prorl_envs.sandbox.filesystem.images import Images
from prorl_envs.sandbox.filesystem.layered import is_layered, read_layered
from prorl_envs.sandbox.filesystem.mount_plan import through_links
from prorl_envs.sandbox.filesystem.python_runtime import system_masks
from prorl_envs.sandbox.limits.enforcement import NodeLimits
from prorl_envs.sandbox.linux.pidfd import Process
from prorl_envs.sandbox.network.proxy import Gateway, Proxy
from prorl_envs.sandbox.template.template import TemplateSpec

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0


class IsolatedDriver[S: "IsolatedSandbox"](NodeDriver[S]):
    """Base class of isolating drivers. For the arguments see `NodeDriver`."""

    def __init__(
        self, root: Path | None, *, templates: Mapping[str, TemplateSpec], limits: NodeLimits
    ) -> None:
        super().__init__(root, templates=templates, limits=limits)
        self.system_masks = system_masks()
        self.images = Images(self.directory.path)
        #: Runs the proxies of sandboxes with an allowlist.
        self.gateway = Gateway()
        self._warned: set[str] = set()

    async def image_env(self, image: Path) -> dict[str, str]:
        """Return the variables that an image sets: see `NodeDriver`. A SIF is mounted by FUSE, and
        stays mounted for the next sandbox.
        """
        if is_layered(image):
            return dict((await asyncio.to_thread(read_layered, image)).config.env)
        use = await self.images.acquire(image)
        try:
            return await asyncio.to_thread(read_image_env, use.layers[0])
        finally:
            await self.images.release(use)

    def check_network(self, spec: SandboxSpec) -> None:
        """Warn if a sandbox uses the host's network, once per reason."""
        if spec.network.open:
            reason = f": {spec.network.reason}" if spec.network.reason else ""
            if reason not in self._warned:
                self._warned.add(reason)
                logger.warning("a sandbox starts with access to the host's whole network%s", reason)

    async def _release(self) -> None:
        await self.images.aclose()
        await self.gateway.aclose()


class IsolatedSandbox(NodeSandbox):
    """Base class of isolated sandboxes. For the arguments see `NodeSandbox`."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, root: Path, driver: IsolatedDriver[Any]) -> None:
        super().__init__(sandbox_id, spec, root, driver)
        self._driver: IsolatedDriver[Any] = driver
        #: The spec with paths resolved, as passed to the runtime; `spec` is the requested one.
        self._inside = through_links(_with_name_service(spec))
        self._first: Process | None = None
        self._proxy: Proxy | None = None
        self._launching: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return super().alive and self._first is not None and self._first.alive

    @property
    def pid(self) -> int:
        """Host pid of the sandbox's first process; for operators.

        Raises:
            SandboxError: the sandbox was not started.
        """
        if self._first is None:
            raise SandboxError(f"sandbox {self.id} was not started")
        return self._first.pid

    @property
    def first_pid(self) -> int | None:
        return None if self._first is None else self._first.pid

    @abstractmethod
    async def open_socket(self, *, netlink: bool = False) -> socket.socket:
        """Return a new IPv4 stream or netlink socket of the sandbox's own network, owned by the caller.

        Raises SandboxError if the sandbox has stopped.
        """

    async def listen(self, host: str, port: int) -> socket.socket:
        """Like `listen_loopback`, at this address and port. Raises SandboxError if the port is in use."""
        listener = await self.open_socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            listener.close()
            raise SandboxError(f"cannot listen on {host}:{port} in sandbox {self.id}: {error}") from error
        return listener

    async def listen_loopback(self) -> socket.socket:
        """See `Sandbox.listen_loopback`."""
        return await self.listen("127.0.0.1", 0)

    async def _start_proxy(self) -> None:
        if allow := self._spec.network.allow:
            listener = await self.listen("127.0.0.1", PROXY_PORT)
            self._proxy = self._driver.gateway.serve(self.id, listener, allow)

    async def launch(self) -> None:
        """Create the directories, run the runtime and wait for the first process."""
        self._launching = asyncio.create_task(self._launch())
        # Not cancellable, because a launch that stops halfway could leave a process that waits forever.
        await asyncio.shield(self._launching)
        if self._closing is not None:
            raise SandboxError(f"sandbox {self.id} was closed while it started")

    @abstractmethod
    async def _launch(self) -> None: ...

    @abstractmethod
    async def _end_processes(self) -> None: ...

    def _before_end(self) -> None:
        """First step of closing, also run while the sandbox still starts."""

    async def _end(self) -> None:
        self._before_end()
        if self._launching is not None:
            await asyncio.gather(self._launching, return_exceptions=True)
        if self._proxy is not None:
            await self._proxy.aclose()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._end_processes()
        except TimeoutError:
            raise SandboxError(f"sandbox {self.id} did not end in {CLOSE_TIMEOUT_S} s") from None


def _with_name_service(spec: SandboxSpec) -> SandboxSpec:
    """Return `spec` with the host's resolv.conf mounted, if the sandbox has the host's network."""
    source = Path("/etc/resolv.conf")
    if not spec.network.open or not source.is_file():
        return spec
    return replace(spec, mounts=(*spec.mounts, Mount(source=source.resolve(), target=str(source))))
