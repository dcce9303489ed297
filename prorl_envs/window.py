"""Adaptive concurrency limit (calls of a model server, starts of sandboxes), derived from overload answers.

Additive increase, multiplicative decrease, as in TCP (Chiu and Jain, 1989): each overload answer reduces the
limit by a quarter, at most once a second; each full round of answers adds one. Without overload answers there
is no limit.
"""

import math
from dataclasses import dataclass

#: Factor applied to the limit on an overload answer; seconds in which further overload answers are ignored.
DECREASE, IGNORED_S = 0.75, 1.0
#: At this value, the limit is removed.
MANY = 4096.0


@dataclass(slots=True)
class AimdWindow:
    """Concurrency limit of one server.

    Args:
        limit: calls in flight, at least 1.
        cut_at: monotonic seconds of the last overload answer that counted.
    """

    limit: float = math.inf
    cut_at: float = -math.inf

    def full(self, in_flight: int) -> bool:
        """Return whether a further call would exceed the limit."""
        return in_flight >= max(1, int(min(self.limit, MANY))) and self.limit < math.inf

    def complained(self, in_flight: int, now: float) -> None:
        """Reduce the limit: the server reported overload with `in_flight` calls in flight."""
        if now - self.cut_at >= IGNORED_S:
            self.limit = max(1.0, DECREASE * min(self.limit, in_flight))
            self.cut_at = now

    def answered(self, in_flight: int) -> None:
        """Raise the limit: a call was answered; `in_flight` includes that call."""
        if in_flight + 1 >= self.limit:
            self.limit += 1.0 / self.limit
            if self.limit >= MANY:
                self.limit = math.inf
