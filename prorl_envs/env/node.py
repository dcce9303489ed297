"""This machine's shared resources: one driver, its templates, a cache directory."""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from prorl_envs.sandbox.base import Driver, Sandbox, SandboxSpec
from prorl_envs.sandbox.bubblewrap import BubblewrapDriver
from prorl_envs.tools.pool import WarmPool
from prorl_envs.tools.workplace import Workplace


class Node:
    """Starts sandboxes and equips them with tools.

    Args:
        driver: the sandbox driver of this machine. The node closes it.
        cache_dir: node-local directory for built trees and environments; survives the process.
        warm: most sandboxes that stand ready before they are asked for; see `WarmPool`.
    """

    def __init__(self, driver: Driver, cache_dir: Path, *, warm: int = 0) -> None:
        self.driver = driver
        self.cache_dir = cache_dir
        self._pool = WarmPool(driver, limit=warm)

    @classmethod
    def local(cls, *, cache_dir: Path | None = None) -> Self:
        """This machine with its default driver. Call it in the event loop that will use it.

        Args:
            cache_dir: None chooses `$PRORL_CACHE_DIR`, else `prorl-envs` in the user's cache directory.

        Raises:
            SandboxError: the machine cannot run sandboxes.
        """
        return cls(BubblewrapDriver(), cache_dir or default_cache_dir())

    async def sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox. The caller closes it."""
        return await self.driver.start(spec)

    async def workplace(self, spec: SandboxSpec, *, python: bool = False) -> Workplace:
        """A sandbox with its tools. The caller closes it."""
        return await self._pool.take(spec, python=python)

    async def aclose(self) -> None:
        await self._pool.aclose()
        await self.driver.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def default_cache_dir() -> Path:
    """`$PRORL_CACHE_DIR`, else `prorl-envs` in the user's cache directory."""
    if chosen := os.environ.get("PRORL_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prorl-envs"
