"""Memory use of sandboxes, measured off the event loop and only while clients ask for it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from prorl_envs.clock import Clock
from prorl_envs.env.node import MemoryUse

log = logging.getLogger(__name__)

#: Minimum seconds between two measurements, and the largest share of time that measuring may take. Slow
#: measurements are made less often.
EVERY_S, SHARE = 2.0, 0.02


class SandboxMemory:
    """Last measurement of memory use. Reading it starts the next measurement if one is due.

    Args:
        clock: measures time.
        measure: measures the service's own machine.
    """

    def __init__(self, clock: Clock, measure: Callable[[], Awaitable[MemoryUse]]) -> None:
        self._clock = clock
        self._measure = measure
        self._last = MemoryUse()
        self._due = 0.0
        self._measuring: asyncio.Task[None] | None = None

    def look(self) -> MemoryUse:
        """Return the last measurement, and start the next one if it is due. Empty on the first call."""
        idle = self._measuring is None or self._measuring.done()
        if idle and self._clock.monotonic() >= self._due:
            self._measuring = asyncio.create_task(self._update())
        return self._last

    async def aclose(self) -> None:
        """Cancel a running measurement."""
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.wait({self._measuring})

    async def _update(self) -> None:
        started = self._clock.monotonic()
        try:
            self._last = await self._measure()
        except OSError as error:
            log.warning("the memory of sandboxes cannot be measured: %s", error)
        now = self._clock.monotonic()
        self._due = now + max(EVERY_S, (now - started) / SHARE)
