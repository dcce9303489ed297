"""Leases: cancel groups and batches whose client sends no requests about them any more.

A killed trainer sends no message. So a group or batch with `lease_s` is cancelled after this time without a
request about it. Each HTTP request of its owner or of the operator that names it renews the lease. The lease
does not expire while such a request is open, for example a long poll.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prorl_envs.clock import Clock

log = logging.getLogger(__name__)

#: Seconds between two checks for expired leases.
TICK_S = 1.0


@dataclass(slots=True)
class _Lease:
    seconds: float
    last_request: float
    open: int = 0


class Leases:
    """Active leases of a service.

    Args:
        clock: measures the time since the last request.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cancel: Mapping[str, Callable[[str], Awaitable[object]]] = {}
        self._leases: dict[tuple[str, str], _Lease] = {}
        self._not_empty = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def start(self, cancel: Mapping[str, Callable[[str], Awaitable[object]]]) -> None:
        """Start the task that cancels items with expired leases. `cancel`: cancels an item, by kind."""
        self._cancel = cancel
        self._task = asyncio.create_task(self._watch())

    async def aclose(self) -> None:
        """Stop the task that `start` started. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def grant(self, kind: str, name: str, seconds: float | None) -> None:
        """Start a lease for a group or batch. Does nothing if `seconds` is None."""
        if seconds is not None:
            self._leases[kind, name] = _Lease(seconds, self._clock.monotonic())
            self._not_empty.set()

    @contextmanager
    def keep_alive(self, names: set[tuple[str, str]]) -> Iterator[None]:
        """Keep the leases of these items alive while the block runs, and renew them after it."""
        leases = [self._leases[name] for name in names if name in self._leases]
        for lease in leases:
            lease.open += 1
        try:
            yield
        finally:
            for lease in leases:
                lease.open -= 1
                lease.last_request = self._clock.monotonic()

    async def _watch(self) -> None:
        while True:
            if not self._leases:
                self._not_empty.clear()
                await self._not_empty.wait()
            await self._clock.sleep(TICK_S)
            now = self._clock.monotonic()
            for (kind, name), lease in list(self._leases.items()):
                if not lease.open and now - lease.last_request >= lease.seconds:
                    del self._leases[kind, name]
                    await self._expire(kind, name, lease.seconds)

    async def _expire(self, kind: str, name: str, seconds: float) -> None:
        log.info("%s %s: no request for %g s; its unfinished jobs are cancelled", kind, name, seconds)
        try:
            await self._cancel[kind](name)
        except Exception:
            log.exception("%s %s could not be cancelled", kind, name)
