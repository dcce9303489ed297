"""Routing decision: the server for a session's next turn. Pure.

A session stays on the server that caches its prefix, and the siblings of a group start on a server that
caches the task's prompt. Both rules yield if that server would have clearly more in flight than the others.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from prorl_envs.model.types import ServerHealth
from prorl_envs.window import AimdWindow


@dataclass(slots=True)
class ServerState:
    """Router state of one server.

    Args:
        url: its base URL.
        in_flight: requests it is working on now.
        sessions: sessions pinned to it.
        failures: consecutive failures; failures of concurrent requests count once.
        problem: message of the last failure; "" after an answer.
        answered: True if it has answered a turn or a health check since it was added.
        sampled: True if it has answered a turn.
        refused: True after it refused a turn's route, until it answers a turn.
        retry_at: monotonic seconds from which a failing server may be tried again.
        draining: True while it gets no new turns, before its removal.
        joining: True if it was added late or recovered, and has not yet received its share of the work.
        weight_version: last known version of its weights; "" if unknown.
        turns: requests sent to it.
        window: concurrency limit.
    """

    url: str
    in_flight: int = 0
    sessions: int = 0
    failures: int = 0
    problem: str = ""
    answered: bool = False
    sampled: bool = False
    refused: bool = False
    retry_at: float = 0.0
    draining: bool = False
    joining: bool = False
    weight_version: str = ""
    turns: int = 0
    window: AimdWindow = field(default_factory=AimdWindow)

    @property
    def health(self) -> ServerHealth:
        """Health to display."""
        if self.draining:
            return ServerHealth.DRAINING
        if self.failures:
            return ServerHealth.FAILING
        return ServerHealth.HEALTHY if self.answered else ServerHealth.UNKNOWN

    @property
    def full(self) -> bool:
        """True if the server has reached its concurrency limit."""
        return self.window.full(self.in_flight)

    def ready(self, now: float) -> bool:
        """Return true if it is not failing, or if a single request may test its recovery now."""
        return self.failures == 0 or (self.retry_at <= now and self.in_flight == 0)


# Trade-off between session affinity and load balance: the best values found with `bench/router.py`.
#: Requests in flight that do not slow any server; below it a session never moves for balance.
_ROOM = 8
#: A session stays while its server has less than this multiple of the mean in flight: a session without
#: history, and one with the longest history, whose tokens a move would recompute.
_STAY, _STAY_LONGEST = 1.1, 1.2
#: Further samples of a group start on a server that caches its prompt while that server has less than this
#: multiple of the mean in flight.
_BEGIN = 1.1


def decide(
    servers: Iterable[ServerState],
    *,
    pinned: str | None,
    now: float,
    excluded: Collection[str] = (),
    warm: Collection[str] = (),
    weight: float = 1.0,
) -> str | None:
    """Return the server for a session's next turn.

    A session stays on its pinned server (which caches its prefix) while that server is ready and not
    overloaded. A new session goes to a server that caches its group's prompt, if that server has room.
    Otherwise the ready server with the least work in flight is chosen, and among equals the one with the
    fewest sessions, so that an added server never gets more than the others. Sessions of fuller servers move
    to a joining server with their next turns. A full server gets nothing while another server is not full. If
    no server is ready, the server that is due soonest is tried, because a late answer is better than none.

    Args:
        servers: all servers, in the order they were added.
        pinned: URL the session is pinned to, or None.
        now: monotonic seconds.
        excluded: URLs on which this request has already failed.
        warm: URLs that cache the prompt of the session's group.
        weight: cost of recomputing the session's history elsewhere, from 0 (nothing) to 1 (maximum).
    """
    usable = [server for server in servers if not server.draining and server.url not in excluded]
    ready = [server for server in usable if server.ready(now)]
    if not ready:
        return min(usable, key=lambda server: server.retry_at).url if usable else None
    ready = [server for server in ready if not server.full] or ready
    mean = (sum(server.in_flight for server in ready) + 1) / len(ready)
    least = min(ready, key=lambda server: (server.in_flight, server.sessions))
    home = next((server for server in ready if server.url == pinned), None)
    if home is not None:
        underloaded = (
            least.joining and least.in_flight + 1 < mean <= home.in_flight and home.in_flight >= _ROOM
        )
        bound = _STAY + (_STAY_LONGEST - _STAY) * min(max(weight, 0.0), 1.0)
        stays = home.in_flight < max(_ROOM, bound * mean)
        return home.url if stays and not underloaded else least.url
    caching = [server for server in ready if server.url in warm]
    if caching:
        candidate = min(caching, key=lambda server: (server.in_flight, server.sessions))
        if candidate.in_flight < max(_ROOM, _BEGIN * mean):
            return candidate.url
    return least.url
