"""Fair use of one event loop: episodes compute one at a time, with request handlers in between."""

import asyncio
from collections import deque


class LoopFairness:
    """Admission of at most one caller per iteration of the event loop.

    A request needs many short iterations. If eight episodes computed in each iteration, the request would
    wait for all eight in each of them. With this class it waits for one. See decisions/scheduling.md.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._admission_scheduled = False

    async def through(self) -> None:
        """Wait for an iteration in which no other caller was admitted. Callers are admitted in order of
        arrival; without waiting callers, this returns at once."""
        loop = asyncio.get_running_loop()
        if not self._admission_scheduled:
            self._admission_scheduled = True
            loop.call_soon(self._admit_next, loop)
            return
        admitted = loop.create_future()
        self._waiting.append(admitted)
        await admitted

    def _admit_next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            admitted = self._waiting.popleft()
            if not admitted.done():  # otherwise its caller was cancelled
                admitted.set_result(None)
                loop.call_soon(self._admit_next, loop)
                return
        self._admission_scheduled = False
