"""Target size of a warm pool for one kind of sandbox. Pure: times in, a number out."""

import math
from collections import deque


class Demand:
    """Estimate of demand, from the times of requests and the duration of a start.

    The target serves the largest recent burst: the number of sandboxes requested during the time of one
    start. After a single request the target is 0, because there may never be another.

    Args:
        memory_s: seconds for which a burst is remembered.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._start_s = math.inf  # until the first start is measured, all requests form one burst
        self._recent: deque[float] = deque()  # times of requests within the duration of one start
        self._bursts: deque[tuple[float, int]] = deque()  # time and size of each burst, sizes descending
        self._known = False

    def started(self, seconds: float) -> None:
        """Record a start and its duration."""
        self._start_s = seconds if self._start_s == math.inf else 0.8 * self._start_s + 0.2 * seconds

    def taken(self, now: float) -> None:
        """Record a request at `now` (seconds, monotonic)."""
        self._known = bool(self._bursts)
        while self._recent and self._recent[0] < now - self._start_s:
            self._recent.popleft()
        self._recent.append(now)
        while self._bursts and self._bursts[-1][1] <= len(self._recent):
            self._bursts.pop()
        self._bursts.append((now, len(self._recent)))

    def unused(self) -> None:
        """Forget all bursts, because an idle sandbox was discarded: the estimate was too high."""
        self._bursts.clear()

    def wanted(self, now: float) -> int:
        """Return the target number of ready sandboxes at `now`."""
        while self._bursts and self._bursts[0][0] < now - self._memory_s:
            self._bursts.popleft()
        return self._bursts[0][1] if self._bursts and self._known else 0
