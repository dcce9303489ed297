"""Adaptive limit of concurrent sandbox starts.

Too many concurrent starts make each of them slow, and also the tool calls of running sandboxes. A start that
takes several times as long as the fastest of its kind counts as a complaint, and so does a shortage of
memory; `AimdWindow` derives the limit from complaints. No start is refused: starts over the limit wait in a
queue.
"""

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prorl_envs.window import MANY, AimdWindow

#: Initial limit, low enough to measure the fastest start of a kind; doubled each round until a complaint.
FIRST = 2.0
#: A start is slow if it exceeds `SLOW` times the fastest of its kind plus `SLOW_S` seconds.
SLOW, SLOW_S = 3.0, 0.1
#: Share of the difference by which a slower start, beside few others, raises the fastest time.
FORGOTTEN = 0.1
#: Kinds whose fastest time is remembered.
KINDS = 256
#: Seconds between two checks of the memory.
LOOK_S = 0.5


@dataclass(slots=True)
class AdaptiveLimit:
    """Limit of concurrent starts. Only decides; the caller passes the time in seconds.

    Args:
        window: the limit.
        slow, short: counted complaints about slow starts and about low memory.
    """

    window: AimdWindow = field(default_factory=lambda: AimdWindow(FIRST))
    slow: int = 0
    short: int = 0
    _best: OrderedDict[Hashable, float] = field(default_factory=OrderedDict)

    def may_start(self, running: int) -> bool:
        """Return True if another start may run beside `running` others."""
        return not self.window.full(running)

    def took(self, kind: Hashable, seconds: float, running: int, now: float) -> None:
        """Record a successful start.

        Args:
            kind: key shared by starts of comparable duration.
            seconds: duration of the start.
            running: starts in progress, including this one.
            now: monotonic seconds.
        """
        best = self._best.pop(kind, seconds)
        if seconds < best or running <= FIRST:  # a slow start beside many others does not show the best case
            best = min(seconds, best + FORGOTTEN * (seconds - best))
        self._best[kind] = best
        if len(self._best) > KINDS:
            self._best.popitem(last=False)
        if running > 1 and seconds > SLOW * best + SLOW_S:
            self.slow += self._complain(running, now)
        elif self.slow or self.short:
            self.window.answered(running)
        elif 2 * running > self.window.limit:
            self.window.limit = self.window.limit + 1 if self.window.limit < MANY else math.inf

    def memory_is_short(self, running: int, now: float) -> None:
        """Record a shortage of memory."""
        self.short += self._complain(running, now)

    def _complain(self, running: int, now: float) -> bool:
        self.window.complained(max(running, 1), now)
        return self.window.cut_at == now


class StartLimiter:
    """Queue that admits starts in order of arrival.

    Args:
        short: returns True if memory is low.
        now: returns monotonic seconds.
    """

    def __init__(self, short: Callable[[], bool], *, now: Callable[[], float] = time.monotonic) -> None:
        self.pace = AdaptiveLimit()
        self.running = 0
        self._short = short
        self._now = now
        self._looked = -math.inf
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Number of queued starts."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, kind: Hashable) -> AsyncIterator[None]:
        """Admit the start made in this block. A failed start is not counted as a complaint.

        Args:
            kind: key shared by starts of comparable duration.
        """
        self._look()
        await self._enter()
        began = self._now()
        try:
            yield
            now = self._now()
            self.pace.took(kind, now - began, self.running, now)
        finally:
            self._leave()

    def _look(self) -> None:
        now = self._now()
        if now - self._looked >= LOOK_S:
            self._looked = now
            if self._short():
                self.pace.memory_is_short(self.running, now)

    async def _enter(self) -> None:
        if not self._waiting and self.pace.may_start(self.running):
            self.running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # already admitted
                self._leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def _leave(self) -> None:
        self.running -= 1
        while self._waiting and self.pace.may_start(self.running):
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self.running += 1
                turn.set_result(None)
