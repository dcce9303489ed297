"""Time as a parameter: code that waits or measures takes a `Clock`, so that tests control the time.

`SystemClock` is the real clock; `prorl_envs.testing` has a clock that a test moves by hand.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable


class Deadline(Protocol):
    """Value of the `Clock.timeout` context manager."""

    def expired(self) -> bool:
        """Return whether the timeout has expired; also valid after the end of the block."""
        ...


class Alarm(Protocol):
    """Handle of a scheduled callback."""

    def cancel(self) -> None:
        """Cancel the callback. Idempotent."""
        ...


@runtime_checkable
class Clock(Protocol):
    """Monotonic clock, with waits and timeouts."""

    def monotonic(self) -> float:
        """Return the seconds since an arbitrary start; never decreases."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Alarm:
        """Call a function in the running event loop, after `seconds`."""
        ...

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[Deadline]:
        """Cancel the block after `seconds` and raise TimeoutError on leaving it; None means no timeout.

        The meaning is that of `asyncio.timeout`: a cancellation from outside stays a cancellation.
        """
        ...


class SystemClock:
    """Monotonic clock of the machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Alarm:
        return asyncio.get_running_loop().call_later(seconds, callback)

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[Deadline]:
        return asyncio.timeout(seconds)
