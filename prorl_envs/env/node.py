"""Shared resources of this machine: one sandbox driver with its templates, and a cache directory."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from prorl_envs.env.search import SearchSettings
from prorl_envs.errors import InputError
from prorl_envs.images.builder import ImageBuilder
from prorl_envs.images.dockerfile.build import DockerfileBuilder
from prorl_envs.images.layers import LayerStore
from prorl_envs.images.store import ImageStore
from prorl_envs.sandbox.base import Driver, Sandbox, SandboxLimits, SandboxSpec
from prorl_envs.sandbox.drivers.select import choose_driver, make_driver
from prorl_envs.sandbox.limits.enforcement import DEFAULT_LIMITS
from prorl_envs.sandbox.linux.descriptors import sandboxes_allowed
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.pool.warm_pool import WarmPool

#: Default of `max_concurrent_starts`, per processor. It exceeds 1 because a start sometimes waits for a disk.
STARTS_PER_PROCESSOR = 4


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Current state and counters of a node.

    Args:
        open: open sandboxes, including idle ones in the warm pool.
        warm: open sandboxes that are idle in the warm pool.
        handed_out: sandboxes handed out with their tools.
        seconds: total time from request to handover, over all handed-out sandboxes.
        from_pool: handed-out sandboxes that came from the warm pool.
        failed: requests that failed.
        starting: sandboxes that start now.
        waiting: requests that wait for permission to start a sandbox.
    """

    open: int
    warm: int
    handed_out: int
    seconds: float
    from_pool: int
    failed: int
    starting: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of memory that count towards the limits of sandboxes, by sandbox id, as far as measurable.

    Args:
        busy: memory of sandboxes in use.
        warm: memory of idle sandboxes in the warm pool.
    """

    busy: Mapping[str, int] = field(default_factory=dict)
    warm: Mapping[str, int] = field(default_factory=dict)


class Node:
    """Factory of sandboxes with tools.

    Args:
        driver: the sandbox driver of this machine. The node closes it.
        cache_dir: node-local directory for built trees and environments; kept after the process exits.
        warm_pool_size: maximum number of idle sandboxes in the warm pool; see `WarmPool`.
        search: settings of search tools; None uses the defaults.
        max_concurrent_starts: maximum number of sandboxes that start at once; None: four per processor.
        images: creates the image builder, given a progress callback; None keeps images in the cache
            directory.
        dockerfiles: creates the builder of Dockerfiles, given the driver; None keeps layers in the cache
            directory, and reaches no network.
        limits: limits that the driver sets for a sandbox whose spec has none.
    """

    def __init__(
        self,
        driver: Driver,
        cache_dir: Path,
        *,
        warm_pool_size: int = 0,
        search: SearchSettings | None = None,
        max_concurrent_starts: int | None = None,
        images: Callable[[Callable[[str], None]], ImageBuilder] | None = None,
        dockerfiles: Callable[[Driver], DockerfileBuilder] | None = None,
        limits: SandboxLimits = DEFAULT_LIMITS.per_sandbox,
    ) -> None:
        self.driver = driver
        self.limits = limits
        self._images = images
        self._dockerfiles = dockerfiles
        self.search = search or SearchSettings()
        self.cache_dir = cache_dir
        starts = max_concurrent_starts or STARTS_PER_PROCESSOR * len(os.sched_getaffinity(0))
        self._pool = WarmPool(driver, limit=warm_pool_size, max_concurrent_starts=starts)
        self._handed_out = self._failed = 0
        self._seconds = 0.0

    @classmethod
    def local(cls, *, cache_dir: Path | None = None) -> Self:
        """Create the node of this machine, with the driver that `$PRORL_DRIVER` names, else a driver that
        works here.

        Call it in the event loop that will use the node. Blocks for some milliseconds.

        Args:
            cache_dir: None chooses `$PRORL_CACHE_DIR`, else `prorl-envs` in the user's cache directory.

        Raises:
            SandboxError: the machine cannot run sandboxes.
            InputError: the user has no home directory, so there is no cache directory.
        """
        search, cache = SearchSettings.from_environ(os.environ), cache_dir or default_cache_dir()
        return cls(make_driver(choose_driver()), cache, search=search)

    async def sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox. The caller closes it."""
        return await self.driver.start(spec)

    async def open_session(
        self, spec: SandboxSpec, *, python: PythonEngine = PythonEngine.NONE
    ) -> SandboxSession:
        """Open a sandbox with its tools, as `sandbox_session` does. The caller closes it."""
        asked = time.monotonic()
        try:
            session = await self._pool.take(spec, python=python)
        except Exception:
            self._failed += 1
            raise
        self._handed_out += 1
        self._seconds += time.monotonic() - asked
        return session

    def images(self, progress: Callable[[str], None] = lambda line: None) -> ImageBuilder:
        """Return the builder that pulls and builds images.

        Args:
            progress: called with a short line for each step.
        """
        if self._images is not None:
            return self._images(progress)
        return ImageBuilder(ImageStore(self.cache_dir / "images"), progress=progress)

    def dockerfiles(self) -> DockerfileBuilder:
        """Return the builder of Dockerfiles. It uses this node's driver and store of layers."""
        if self._dockerfiles is not None:
            return self._dockerfiles(self.driver)
        return DockerfileBuilder(LayerStore(self.cache_dir / "layers"), self.driver)

    @property
    def max_sandboxes(self) -> int:
        """Maximum number of sandboxes that this process's limits allow."""
        return sandboxes_allowed()

    @property
    def use(self) -> NodeUse:
        """Current state and counters of the node, for operators."""
        return NodeUse(
            open=len(self.driver.sandboxes),
            warm=self._pool.ready,
            handed_out=self._handed_out,
            seconds=self._seconds,
            from_pool=self._pool.hits,
            failed=self._failed,
            starting=self._pool.starting,
            waiting=self._pool.waiting,
        )

    async def memory(self) -> MemoryUse:
        """Measure the memory of the sandboxes in a thread; takes some tenths of a millisecond per sandbox."""
        sandboxes, warm = tuple(self.driver.sandboxes), self._pool.ready_sandboxes
        measured = await asyncio.to_thread(lambda: {sandbox.id: sandbox.memory() for sandbox in sandboxes})
        sizes = {name: size for name, size in measured.items() if size is not None}
        return MemoryUse(
            busy={name: size for name, size in sizes.items() if name not in warm},
            warm={name: size for name, size in sizes.items() if name in warm},
        )

    async def aclose(self) -> None:
        await self._pool.aclose()
        await self.driver.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def default_cache_dir() -> Path:
    """Return `$PRORL_CACHE_DIR`, else `prorl-envs` in the user's cache directory.

    Raises:
        InputError: the user has no home directory.
    """
    if chosen := os.environ.get("PRORL_CACHE_DIR"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prorl-envs"
    except RuntimeError as error:
        hint = "set HOME to a directory that can be written, or PRORL_CACHE_DIR and XDG_STATE_HOME"
        raise InputError("this user has no home directory", hint=hint) from error
