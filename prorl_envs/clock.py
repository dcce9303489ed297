"""Time as a parameter: code that waits or measures takes a `Clock`, so that tests own the time.

`SystemClock` is the real one; `prorl_envs.testing` has one that a test moves by hand.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable


class Deadline(Protocol):
    """What entering `Clock.timeout` gives."""

    def expired(self) -> bool:
        """True once the time was up, also after leaving the block."""
        ...


class Alarm(Protocol):
    """What is called later."""

    def cancel(self) -> None:
        """Do not call. Idempotent."""
        ...


@runtime_checkable
class Clock(Protocol):
    """A monotonic clock and the waits that go with it."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Alarm:
        """Call something in the running event loop, after `seconds`."""
        ...

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[Deadline]:
        """Cancel the block after `seconds` and raise TimeoutError on leaving it; None never does.

        The meaning is that of `asyncio.timeout`: a cancellation from outside stays a cancellation.
        """
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Alarm:
        return asyncio.get_running_loop().call_later(seconds, callback)

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[Deadline]:
        return asyncio.timeout(seconds)
