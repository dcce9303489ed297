"""How many sandboxes of one kind should stand ready. Pure: times in, a number out."""

import math
from collections import deque


class Demand:
    """Learns from when sandboxes were taken and how long one takes to start.

    Enough stand ready to serve the largest burst of late: as many as were taken while one more could not have
    been started. A kind that was asked for only once gets none, for it may never be asked for again.

    Args:
        memory_s: seconds for which a burst is remembered.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._start_s = math.inf  # until the first is there, all that are asked for are one burst
        self._recent: deque[float] = deque()  # when sandboxes were taken, while one starts
        self._bursts: deque[tuple[float, int]] = deque()  # when, and how many: falling from left to right
        self._known = False

    def started(self, seconds: float) -> None:
        """One was started, in so many seconds."""
        self._start_s = seconds if self._start_s == math.inf else 0.8 * self._start_s + 0.2 * seconds

    def taken(self, now: float) -> None:
        """One was asked for at `now` (seconds, monotonic)."""
        self._known = bool(self._bursts)
        while self._recent and self._recent[0] < now - self._start_s:
            self._recent.popleft()
        self._recent.append(now)
        while self._bursts and self._bursts[-1][1] <= len(self._recent):
            self._bursts.pop()
        self._bursts.append((now, len(self._recent)))

    def unused(self) -> None:
        """One that stood ready was given up: what was learned so far was wrong."""
        self._bursts.clear()

    def wanted(self, now: float) -> int:
        """How many should stand ready at `now`."""
        while self._bursts and self._bursts[0][0] < now - self._memory_s:
            self._bursts.popleft()
        return self._bursts[0][1] if self._bursts and self._known else 0
