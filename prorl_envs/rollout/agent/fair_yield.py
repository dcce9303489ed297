"""Fair use of one event loop: episodes compute one at a time, with request handlers in between."""

import asyncio
from collections import deque


class LoopFairness:
    """Admission of at most one caller per iteration of the event loop.

    A request needs many short iterations. If eight episodes computed in each iteration, the request would
    wait for all eight each time; with this class it waits for one. See decisions/scheduling.md.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def through(self) -> None:
        """Return at once if no caller passed in this iteration, else in a later one, first come first
        served."""
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn, loop)
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():  # otherwise its caller was cancelled
                place.set_result(None)
                loop.call_soon(self._turn, loop)
                return
        self._turning = False
