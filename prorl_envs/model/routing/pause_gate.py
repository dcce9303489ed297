"""Gate that holds turns while weights change. It measures the held time, so that deadlines can exclude it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from prorl_envs.clock import Clock, Deadline


class PauseGate:
    """Gate that turns wait at while it is closed.

    Args:
        clock: measures how long the gate was closed.
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
        """Hold all turns. Idempotent."""
        if not self.closed:
            self._closed_at = self._clock.monotonic()
            self._open.clear()

    def open(self) -> None:
        """Release all turns."""
        if self.closed:
            self._closed_s += self._clock.monotonic() - self._closed_at
            self._open.set()

    def closed_s(self) -> float:
        """Return the total seconds for which the gate was closed so far."""
        return self._closed_s + (self._clock.monotonic() - self._closed_at if self.closed else 0.0)

    async def passed(self) -> None:
        """Return once the gate is open."""
        await self._open.wait()


class HeldTime:
    """Seconds for which an episode's model calls were held."""

    def __init__(self) -> None:
        self._before = 0.0
        self._now: Callable[[], float] | None = None
        self._calls = 0

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._before + (self._now() if self._now else 0.0)

    @contextmanager
    def counting(self, closed_s: Callable[[], float]) -> Iterator[None]:
        """Add the growth of `closed_s` while the block runs. Concurrent blocks count once."""
        if not self._calls:
            start = closed_s()
            self._now = lambda: closed_s() - start
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._before, self._now = self.seconds(), None


class ActiveTimeout:
    """Timeout like `Clock.timeout` that excludes the growth of `held`. For one `async with`.

    Args:
        clock: measures the time.
        seconds: seconds, without the excluded time, after which the block is cancelled.
        held: returns the excluded seconds so far.
    """

    # Not a recursive closure: each would be a reference cycle for the garbage collector, ten or more per job.
    __slots__ = ("_alarm", "_began", "_clock", "_deadline", "_held", "_held_before", "_seconds")

    def __init__(self, clock: Clock, seconds: float, held: Callable[[], float]) -> None:
        self._clock, self._seconds, self._held = clock, seconds, held
        self._deadline = asyncio.timeout(None)

    async def __aenter__(self) -> Deadline:
        self._began, self._held_before = self._clock.monotonic(), self._held()
        await self._deadline.__aenter__()
        self._alarm = self._clock.call_later(self._seconds, self._check)
        return self._deadline

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarm.cancel()
        await self._deadline.__aexit__(kind, error, trace)

    def _check(self) -> None:
        held_s = self._held() - self._held_before
        remaining = self._seconds - (self._clock.monotonic() - self._began) + held_s
        if remaining > 0:
            self._alarm = self._clock.call_later(remaining, self._check)
        else:
            self._deadline.reschedule(asyncio.get_running_loop().time())
