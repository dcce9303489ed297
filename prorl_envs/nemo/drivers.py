"""One driver per event loop, shared by all providers in it: NeMo Gym makes a provider for every sandbox.

A driver ends when the last provider lets go of it, and at the latest with its loop, or with the process.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from prorl_envs.config import Settings
from prorl_envs.nemo.gate import Gate
from prorl_envs.nemo.plan import ProviderConfig
from prorl_envs.sandbox.choice import choose_driver, make_driver
from prorl_envs.sandbox.containment import DEFAULT_LIMITS, NodeLimits
from prorl_envs.sandbox.driver import NodeDriver
from prorl_envs.sandbox.files import node_local_base


@dataclass(frozen=True, slots=True)
class DriverChoice:
    """Which driver.

    Args:
        name: one of `choice.DRIVERS`.
        run_dir: where its sandboxes keep their files; None for the default.
        limits: the machine's.
        bwrap, apptainer: the programs; None for the default.
    """

    name: str = "auto"
    run_dir: Path | None = None
    limits: NodeLimits = DEFAULT_LIMITS
    bwrap: Path | None = None
    apptainer: Path | None = None

    @classmethod
    def of(cls, config: ProviderConfig, settings: Settings) -> Self:
        """What a provider asks for, over the settings."""
        return cls(
            name=config.driver or settings.driver,
            run_dir=config.run_dir or settings.run_dir,
            limits=NodeLimits.of(settings.limits.model_dump()),
            bwrap=settings.bwrap,
            apptainer=settings.apptainer,
        )

    @property
    def base(self) -> Path:
        """Below which the driver makes its directory."""
        return node_local_base() if self.run_dir is None else self.run_dir.resolve()


class SharedDriver:
    """A driver and the number of its users. Made by `acquire`; every user calls `release` once."""

    def __init__(self, choice: DriverChoice, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.driver: NodeDriver[Any] = make_driver(
            name, choice.base, bwrap=choice.bwrap, apptainer=choice.apptainer, limits=choice.limits
        )
        self.gate = Gate(choice.base)
        self._key = (loop, choice)
        self._users = 0
        self._lifetime = self._until_loop_ends()

    @classmethod
    async def acquire(cls, choice: DriverChoice) -> "SharedDriver":
        """The driver of the running loop, made where there is none.

        Raises:
            SandboxError: the machine cannot run sandboxes.
        """
        loop = asyncio.get_running_loop()
        for key in [key for key in _shared if key[0].is_closed()]:
            del _shared[key]  # its processes ended with its sockets
        if (loop, choice) not in _shared:
            name = await asyncio.to_thread(
                choose_driver, choice.name, choice.base, bwrap=choice.bwrap, apptainer=choice.apptainer
            )
        shared = _shared.get((loop, choice))  # meanwhile another may have been faster
        if shared is None:
            shared = _shared[loop, choice] = cls(choice, loop, name)
            await anext(shared._lifetime)
        shared._users += 1
        return shared

    async def release(self) -> None:
        """Let go of the driver. The last one to do so closes it, with every sandbox still open."""
        self._users -= 1
        if self._users == 0:
            _shared.pop(self._key, None)
            await self._lifetime.aclose()

    async def _until_loop_ends(self) -> AsyncGenerator[None]:
        # A loop closes its generators when it shuts down (`asyncio.run` sees to that), whoever forgot to.
        try:
            yield
        finally:
            _shared.pop(self._key, None)
            await self.gate.aclose()
            await self.driver.aclose()


#: Only here, because NeMo Gym makes providers from names and mappings and hands them nothing else.
_shared: dict[tuple[asyncio.AbstractEventLoop, DriverChoice], SharedDriver] = {}
