"""What drivers share that keep a sandbox apart by namespaces: images, masks, networks, and a first process
whose end ends all others."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.containment import NodeLimits
from prorl_envs.sandbox.driver import NodeDriver, NodeSandbox
from prorl_envs.sandbox.image_env import read_image_env
from prorl_envs.sandbox.images import Images
from prorl_envs.sandbox.processes import Process
from prorl_envs.sandbox.proxy import Gateway, Proxy
from prorl_envs.sandbox.runtime import system_masks
from prorl_envs.sandbox.template import TemplateSpec

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0


class IsolatedDriver[S: "IsolatedSandbox"](NodeDriver[S]):
    """See `NodeDriver` for the arguments."""

    def __init__(
        self, root: Path | None, *, templates: Mapping[str, TemplateSpec], limits: NodeLimits
    ) -> None:
        super().__init__(root, templates=templates, limits=limits)
        self.system_masks = system_masks()
        self.images = Images(self.directory.base)
        #: Serves the sandboxes with an allowlist, and counts for operators.
        self.gateway = Gateway()
        self._warned: set[str] = set()

    async def image_env(self, image: Path) -> dict[str, str]:
        """The variables that an image sets: see `NodeDriver`. A SIF is mounted for it, by FUSE, and stays
        mounted for its sandboxes.
        """
        use = await self.images.acquire(image)
        try:
            return await asyncio.to_thread(read_image_env, use.root)
        finally:
            await self.images.release(use)

    def warn_once(self, text: str) -> None:
        """Log what users of this driver have to know, once."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)

    def check_network(self, spec: SandboxSpec) -> None:
        """Say so where a sandbox is not kept off the host's network."""
        if spec.network.open:
            self.warn_once("a sandbox was asked for that has the host's network, all of it")

    async def _release(self) -> None:
        await self.images.aclose()
        await self.gateway.aclose()


class IsolatedSandbox(NodeSandbox):
    """See `NodeSandbox` for the arguments."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, root: Path, driver: IsolatedDriver[Any]) -> None:
        super().__init__(sandbox_id, spec, root, driver)
        #: As the runtime is told; `spec` says what was asked for.
        self._inside = _with_name_service(spec)
        self._first: Process | None = None
        self._proxy: Proxy | None = None
        self._launching: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return super().alive and self._first is not None and self._first.alive

    @property
    def pid(self) -> int:
        """Of the sandbox's first process, on the host; for operators.

        Raises:
            SandboxError: it has not been started.
        """
        if self._first is None:
            raise SandboxError(f"sandbox {self.id} was not started")
        return self._first.pid

    @property
    def first_pid(self) -> int | None:
        return None if self._first is None else self._first.pid

    async def launch(self) -> None:
        """Make the directories, run the runtime and wait for the first process."""
        self._launching = asyncio.create_task(self._launch())
        # Never cut short: what ended halfway could leave a process that waits forever.
        await asyncio.shield(self._launching)
        if self._closing is not None:
            raise SandboxError(f"sandbox {self.id} was closed while it started")

    @abstractmethod
    async def _launch(self) -> None: ...

    @abstractmethod
    async def _end_processes(self) -> None: ...

    def _before_end(self) -> None:
        """What is done first, also while it still starts."""

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
    """With the host's way to look up names, where it has the host's network."""
    source = Path("/etc/resolv.conf")
    if not spec.network.open or not source.is_file():
        return spec
    return replace(spec, mounts=(*spec.mounts, Mount(source=source.resolve(), target=str(source))))
