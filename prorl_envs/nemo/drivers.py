"""One driver per event loop, shared by all its providers: NeMo Gym creates a provider for every sandbox.

A driver closes when the last provider releases it, and at the latest with its event loop or with the process.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from prorl_envs.config import Settings
from prorl_envs.nemo.plan import ProviderConfig
from prorl_envs.nemo.sharing import SandboxShareServer
from prorl_envs.sandbox.drivers.base import NodeDriver
from prorl_envs.sandbox.drivers.select import choose_driver, make_driver
from prorl_envs.sandbox.filesystem.directories import node_local_base
from prorl_envs.sandbox.limits.enforcement import DEFAULT_LIMITS, NodeLimits


@dataclass(frozen=True, slots=True)
class DriverChoice:
    """Settings that select a driver.

    Args:
        name: one of `select.DRIVERS`.
        run_dir: directory of its sandboxes' files; None for the default.
        limits: limits of the machine.
        bwrap, apptainer: the programs; None for the default.
    """

    name: str = "auto"
    run_dir: Path | None = None
    limits: NodeLimits = DEFAULT_LIMITS
    bwrap: Path | None = None
    apptainer: Path | None = None

    @classmethod
    def of(cls, config: ProviderConfig, settings: Settings) -> Self:
        """Combine a provider's configuration with the settings; the configuration takes precedence."""
        return cls(
            name=config.driver or settings.driver,
            run_dir=config.run_dir or settings.run_dir,
            limits=NodeLimits.of(settings.limits.model_dump()),
            bwrap=settings.bwrap,
            apptainer=settings.apptainer,
        )

    @property
    def base(self) -> Path:
        """Parent of the directory that the driver creates."""
        return node_local_base(self.run_dir)


class SharedDriver:
    """A driver and the number of its users. Created by `acquire`; every user calls `release` once."""

    def __init__(self, choice: DriverChoice, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.driver: NodeDriver[Any] = make_driver(
            name, choice.base, bwrap=choice.bwrap, apptainer=choice.apptainer, limits=choice.limits
        )
        self.sharing = SandboxShareServer(choice.base)
        self._key = (loop, choice)
        self._users = 0
        self._lifetime = self._until_loop_ends()

    @classmethod
    async def acquire(cls, choice: DriverChoice) -> "SharedDriver":
        """Return the driver of the running loop; create it if there is none.

        Raises:
            SandboxError: the machine cannot run sandboxes.
        """
        loop = asyncio.get_running_loop()
        for key in [key for key in _shared if key[0].is_closed()]:
            del _shared[key]  # the driver's processes exited when its sockets closed
        if (loop, choice) not in _shared:
            name = await asyncio.to_thread(
                choose_driver, choice.name, choice.base, bwrap=choice.bwrap, apptainer=choice.apptainer
            )
        shared = _shared.get((loop, choice))  # another task may have created it meanwhile
        if shared is None:
            shared = _shared[loop, choice] = cls(choice, loop, name)
            await anext(shared._lifetime)
        shared._users += 1
        return shared

    async def release(self) -> None:
        """Release the driver. The last release closes it, with every sandbox still open."""
        self._users -= 1
        if self._users == 0:
            _shared.pop(self._key, None)
            await self._lifetime.aclose()

    async def _until_loop_ends(self) -> AsyncGenerator[None]:
        # A loop closes its generators when it shuts down (as `asyncio.run` ensures), even without `release`.
        try:
            yield
        finally:
            _shared.pop(self._key, None)
            await self.sharing.aclose()
            await self.driver.aclose()


#: Global only because NeMo Gym creates providers from names and mappings, and passes them nothing else.
_shared: dict[tuple[asyncio.AbstractEventLoop, DriverChoice], SharedDriver] = {}
