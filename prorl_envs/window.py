"""How much may be under way at once (calls of a model server, starts of sandboxes): found by complaints.

Additive increase, multiplicative decrease, as TCP does it (Chiu and Jain, 1989): each "too many" takes a
quarter off, once a second at most; each full round of answers adds one. Where nothing complains there is no
bound.
"""

import math
from dataclasses import dataclass

#: What a complaint leaves, and seconds in which further ones are the same complaint.
KEPT, SAME_S = 0.75, 1.0
#: From here on there is no bound any more.
MANY = 4096.0


@dataclass(slots=True)
class Window:
    """The bound of one server.

    Args:
        limit: calls in flight, at least 1.
        cut_at: monotonic seconds of the last complaint that counted.
    """

    limit: float = math.inf
    cut_at: float = -math.inf

    def full(self, in_flight: int) -> bool:
        """A further call would be one too many."""
        return in_flight >= max(1, int(min(self.limit, MANY))) and self.limit < math.inf

    def complained(self, in_flight: int, now: float) -> None:
        """The server said that it has too much, with so many calls in flight."""
        if now - self.cut_at >= SAME_S:
            self.limit = max(1.0, KEPT * min(self.limit, in_flight))
            self.cut_at = now

    def answered(self, in_flight: int) -> None:
        """A call was answered; in flight, with it, were so many."""
        if in_flight + 1 >= self.limit:
            self.limit += 1.0 / self.limit
            if self.limit >= MANY:
                self.limit = math.inf
