"""How many sandboxes start at once: as many as asked for, and fewer while that does no good.

More starts at a time than a machine can take make each of them slow, and with them every tool call beside
them. A start that took several times what its kind takes at its best is a complaint, and so is a shortage of
memory; `Window` makes a bound of them. Nobody is refused: who comes over the bound waits for its turn.
"""

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prorl_envs.window import MANY, Window

#: At once, at first, so that the best of a kind is seen; doubled with each round until something complains.
FIRST = 2.0
#: A start is slow that takes so many times its kind's best, and so many seconds, more.
SLOW, SLOW_S = 3.0, 0.1
#: What a start that was slower than the best, beside few others, takes of it: a share of the difference.
FORGOTTEN = 0.1
#: Kinds whose best is remembered.
KINDS = 256
#: Seconds between two looks at the memory.
LOOK_S = 0.5


@dataclass(slots=True)
class Pace:
    """Decides, and does nothing; seconds are the caller's.

    Args:
        window: the bound.
        slow, short: complaints that counted: of slow starts, and of little memory.
    """

    window: Window = field(default_factory=lambda: Window(FIRST))
    slow: int = 0
    short: int = 0
    _best: OrderedDict[Hashable, float] = field(default_factory=OrderedDict)

    def may_start(self, running: int) -> bool:
        """Whether one more may start beside so many."""
        return not self.window.full(running)

    def took(self, kind: Hashable, seconds: float, running: int, now: float) -> None:
        """A start ended well.

        Args:
            kind: what makes one start as good as another.
            seconds: it took.
            running: starts under way, this one included.
            now: monotonic seconds.
        """
        best = self._best.pop(kind, seconds)
        if seconds < best or running <= FIRST:  # what is slow beside many says nothing of the best
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
        """There is little memory left."""
        self.short += self._complain(running, now)

    def _complain(self, running: int, now: float) -> bool:
        self.window.complained(max(running, 1), now)
        return self.window.cut_at == now


class Starts:
    """Lets starts through, in the order in which they come.

    Args:
        short: whether memory is short now.
        now: monotonic seconds.
    """

    def __init__(self, short: Callable[[], bool], *, now: Callable[[], float] = time.monotonic) -> None:
        self.pace = Pace()
        self.running = 0
        self._short = short
        self._now = now
        self._looked = -math.inf
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Starts that wait for their turn."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, kind: Hashable) -> AsyncIterator[None]:
        """Start one in this block. A start that fails says nothing of the machine.

        Args:
            kind: what makes one start as good as another.
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
            if not turn.cancelled():  # it had its turn already
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
