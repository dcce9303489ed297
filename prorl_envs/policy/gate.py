"""Holds turns while weights change, and says how long that took, so that deadlines do not count it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

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


class ActiveTimeout:
    """As `Clock.timeout`, not counting what `held` grows by meanwhile. For `async with`, once.

    Args:
        clock: measures.
        seconds: after which the block is cancelled.
        held: seconds that do not count, up to now.
    """

    # No closure that calls itself: in each such one the collector would find a circle, ten and more a job.
    __slots__ = ("_alarm", "_began", "_clock", "_deadline", "_held", "_held_before", "_seconds")

    def __init__(self, clock: Clock, seconds: float, held: Callable[[], float]) -> None:
        self._clock, self._seconds, self._held = clock, seconds, held
        self._deadline = asyncio.timeout(None)

    async def __aenter__(self) -> Deadline:
        self._began, self._held_before = self._clock.monotonic(), self._held()
        await self._deadline.__aenter__()
        self._alarm = self._clock.call_later(self._seconds, self._ring)
        return self._deadline

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarm.cancel()
        await self._deadline.__aexit__(kind, error, trace)

    def _ring(self) -> None:
        held_s = self._held() - self._held_before
        left = self._seconds - (self._clock.monotonic() - self._began) + held_s
        if left > 0:
            self._alarm = self._clock.call_later(left, self._ring)
        else:
            self._deadline.reschedule(asyncio.get_running_loop().time())
