"""The decision itself: which of the servers gets a session's next turn. Pure.

A session stays where its prefix is cached, siblings of a group begin where one of them has left the task's
prompt, and both give way where a server would have clearly more in flight than the others.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from prorl_envs.window import Window


@dataclass(slots=True)
class ServerState:
    """What the router knows of one server.

    Args:
        url: its base URL.
        in_flight: requests it is working on now.
        sessions: sessions pinned to it.
        failures: consecutive windows in which it failed; 0 is healthy.
        retry_at: monotonic seconds from which a failing server may be tried again.
        draining: gets no new sessions and none back.
        joining: came late or came back, and has not had its share of the work yet.
        weight_version: of its weights, as it was last heard; "" where it is not known.
        turns: requests it was given.
        window: how much it may have in flight.
    """

    url: str
    in_flight: int = 0
    sessions: int = 0
    failures: int = 0
    retry_at: float = 0.0
    draining: bool = False
    joining: bool = False
    weight_version: str = ""
    turns: int = 0
    window: Window = field(default_factory=Window)

    @property
    def full(self) -> bool:
        """It may not have more in flight than it has."""
        return self.window.full(self.in_flight)

    def ready(self, now: float) -> bool:
        """Healthy, or due for the single request that shows whether it recovered."""
        return self.failures == 0 or (self.retry_at <= now and self.in_flight == 0)


@dataclass(frozen=True, slots=True)
class Balance:
    """How much affinity may cost in balance.

    Args:
        room: requests in flight that no server minds; below it a session never moves for balance.
        stay: a session stays while its server has at most so many times the mean in flight; what it would
            have to compute again if it moved, compared with other sessions, makes the bound wider or tighter.
        spread: widest that bound gets, for the longest histories.
        begin: a group's further samples begin where its prompt is cached while that server has at most so
            many times the mean in flight.
    """

    room: int = 8
    stay: float = 1.1
    spread: float = 1.2
    begin: float = 1.1


#: What was found best in `bench/router.py`.
DEFAULT = Balance()


def decide(
    servers: Iterable[ServerState],
    *,
    pinned: str | None,
    now: float,
    excluded: Collection[str] = (),
    warm: Collection[str] = (),
    weight: float = 1.0,
    balance: Balance = DEFAULT,
) -> str | None:
    """The server for a session's next turn.

    A session stays where it is pinned (the server holds its prefix in cache) while that server is ready and
    not overloaded. A new one goes where its group's prompt is cached, if that server has room. Otherwise it
    goes to the ready server with the least work in flight, and among equals the fewest sessions; so a server
    that is added is never given more than the others have. To one that has not had its share yet, sessions of
    fuller servers move as their turns come. One that is full gets nothing while another is not. With none
    ready, the one due soonest is tried: a late answer is better than none.

    Args:
        servers: all servers, in the order they were added.
        pinned: URL the session is pinned to, or None.
        now: monotonic seconds.
        excluded: URLs this request failed on already.
        warm: URLs that hold the prompt of the session's group.
        weight: the session's history, in [0, 1]: 0 costs nothing to compute again, 1 as much as any other.
        balance: the bounds.
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
        behind = (
            least.joining and least.in_flight + 1 < mean <= home.in_flight and home.in_flight >= balance.room
        )
        bound = balance.stay + (balance.spread - balance.stay) * min(max(weight, 0.0), 1.0)
        stays = home.in_flight < max(balance.room, bound * mean)
        return home.url if stays and not behind else least.url
    known = [server for server in ready if server.url in warm]
    if known:
        nearest = min(known, key=lambda server: (server.in_flight, server.sessions))
        if nearest.in_flight < max(balance.room, balance.begin * mean):
            return nearest.url
    return least.url
