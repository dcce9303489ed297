"""Lets the episodes of one event loop compute one after the other, so that others get in between."""

import asyncio
from collections import deque


class Turnstile:
    """One caller a round of the event loop.

    What a request needs is many short rounds. Where eight episodes are due at once, each round would hold all
    eight, and the request waits for them each time; here a round holds one. See 0068 in docs/decisions.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def through(self) -> None:
        """Return at once where nobody has come through in this round, else in a later one, first come first
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
            if not place.done():  # else its caller was cancelled
                place.set_result(None)
                loop.call_soon(self._turn, loop)
                return
        self._turning = False
