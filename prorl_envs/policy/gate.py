"""Holds turns while weights change, and says how long that took, so that deadlines do not count it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from prorl_envs.clock import Clock, Deadline


class Gate:
    """Open, or closed for a while.

    Args:
        clock: measures how long it was closed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open = asyncio.Event()
        self._open.set()
        self._closed_at = 0.0
        self._closed_s = 0.0

    @property
    def closed(self) -> bool:
        return not self._open.is_set()

    def close(self) -> None:
        """Let nobody through. Closing twice is the same."""
        if not self.closed:
            self._closed_at = self._clock.monotonic()
            self._open.clear()

    def open(self) -> None:
        """Let everybody through."""
        if self.closed:
            self._closed_s += self._clock.monotonic() - self._closed_at
            self._open.set()

    def closed_s(self) -> float:
        """Seconds it was closed, all in all, up to now."""
        return self._closed_s + (self._clock.monotonic() - self._closed_at if self.closed else 0.0)

    async def passed(self) -> None:
        """Return once it is open."""
        await self._open.wait()


class HeldTime:
    """Seconds that an episode's model calls were held."""

    def __init__(self) -> None:
        self._before = 0.0
        self._now: Callable[[], float] | None = None
        self._calls = 0

    def seconds(self) -> float:
        """Up to now."""
        return self._before + (self._now() if self._now else 0.0)

    @contextmanager
    def counting(self, closed_s: Callable[[], float]) -> Iterator[None]:
        """Count for as long as the block runs what `closed_s` grows by. Of blocks at the same time, once."""
        if not self._calls:
            began = closed_s()
            self._now = lambda: closed_s() - began
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._before, self._now = self.seconds(), None


@asynccontextmanager
async def active_timeout(clock: Clock, seconds: float, held: Callable[[], float]) -> AsyncIterator[Deadline]:
    """As `Clock.timeout`, not counting what `held` grows by meanwhile."""
    began, held_before = clock.monotonic(), held()
    # It rings in a later round of the loop, in which the block below has been entered.
    alarm = clock.call_later(seconds, lambda: ring())

    def ring() -> None:
        nonlocal alarm
        left = seconds - (clock.monotonic() - began) + (held() - held_before)
        if left > 0:
            alarm = clock.call_later(left, ring)
        else:
            deadline.reschedule(asyncio.get_running_loop().time())

    async with asyncio.timeout(None) as deadline:
        try:
            yield deadline
        finally:
            alarm.cancel()
