"""Fake clock that tests advance explicitly."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class FakeAlarm:
    """A `prorl_envs.clock.Alarm` that calls its function when `wake` is set, unless it has been cancelled."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._callback: Callable[[], None] | None = callback
        self.wake.add_done_callback(lambda _: self._callback and self._callback())

    def cancel(self) -> None:
        self._callback = None
        self.wake.cancel()


class FakeClock:
    """Monotonic time and sleeping, without waiting.

    A `prorl_envs.clock.Clock`. If a component needs only a part of it, pass `clock.monotonic` or
    `clock.sleep`.

    Args:
        start: initial time in seconds.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._changed = asyncio.Event()

    def monotonic(self) -> float:
        """Return the time in seconds, like `time.monotonic`."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has been advanced by `seconds`; like `asyncio.sleep`, 0 only yields."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), wake))
        self._changed.set()
        await wake

    def call_later(self, seconds: float, callback: Callable[[], None]) -> "FakeAlarm":
        """Schedule a callback like `asyncio.AbstractEventLoop.call_later`, in this clock's time."""
        alarm = FakeAlarm(callback)
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), alarm.wake))
        self._changed.set()
        if seconds <= 0:
            alarm.wake.set_result(None)
        return alarm

    @asynccontextmanager
    async def timeout(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Limit a block like `asyncio.timeout`, in this clock's time."""
        async with asyncio.timeout(None) as deadline:
            if seconds is None:
                yield deadline
                return
            loop = asyncio.get_running_loop()
            alarm = self.call_later(seconds, lambda: deadline.reschedule(loop.time()))
            try:
                yield deadline
            finally:
                alarm.cancel()

    @property
    def sleeping(self) -> tuple[float, ...]:
        """Wake-up times of the sleepers, soonest first."""
        return tuple(when for when, _, wake in sorted(self._sleepers) if not wake.done())

    def advance(self, seconds: float) -> None:
        """Advance the clock; due sleepers wake in order at the loop's next iteration."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            wake = heapq.heappop(self._sleepers)[2]
            if not wake.done():  # a cancelled sleeper
                wake.set_result(None)

    async def wait_for_sleepers(self, count: int = 1) -> None:
        """Wait until at least `count` tasks sleep on this clock."""
        while len(self.sleeping) < count:
            self._changed.clear()
            await self._changed.wait()
