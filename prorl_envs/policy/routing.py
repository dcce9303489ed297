"""Which server answers which session: decided without I/O, so that every race is a synchronous test."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass


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
    """

    url: str
    in_flight: int = 0
    sessions: int = 0
    failures: int = 0
    retry_at: float = 0.0
    draining: bool = False

    def ready(self, now: float) -> bool:
        """Healthy, or due for the single request that shows whether it recovered."""
        return self.failures == 0 or (self.retry_at <= now and self.in_flight == 0)


def decide(
    servers: Iterable[ServerState], *, pinned: str | None, now: float, excluded: Collection[str] = ()
) -> str | None:
    """The server for a session's next turn.

    A session stays where it is pinned (the server holds its prefix in cache) while that server is ready.
    Otherwise it goes to the ready server with the least work in flight, and among equals the fewest
    sessions; so a server that is added catches up with the others, and is never given more than they have.
    With none ready, the one due soonest is tried: a late answer is better than none.

    Args:
        servers: all servers, in the order they were added.
        pinned: URL the session is pinned to, or None.
        now: monotonic seconds.
        excluded: URLs this request failed on already.
    """
    usable = [server for server in servers if not server.draining and server.url not in excluded]
    ready = [server for server in usable if server.ready(now)]
    if any(server.url == pinned for server in ready):
        return pinned
    if ready:
        return min(ready, key=lambda server: (server.in_flight, server.sessions)).url
    return min(usable, key=lambda server: server.retry_at).url if usable else None


class Router:
    """The state `decide` works on.

    Args:
        max_sessions: pins remembered; the longest idle sessions are forgotten first.
        cooldown_s: seconds a failed server is left alone; doubles with each failure after that.
        max_cooldown_s: longest such time.
    """

    def __init__(
        self, *, max_sessions: int = 65_536, cooldown_s: float = 2.0, max_cooldown_s: float = 60.0
    ) -> None:
        self._max_sessions = max_sessions
        self._cooldown_s = cooldown_s
        self._max_cooldown_s = max_cooldown_s
        self._servers: dict[str, ServerState] = {}
        self._pins: OrderedDict[str, str] = OrderedDict()

    @property
    def servers(self) -> tuple[ServerState, ...]:
        """All servers, draining ones included, in the order they were added."""
        return tuple(self._servers.values())

    def add(self, url: str) -> None:
        """Take a server in; one that was draining is taken back."""
        self._servers.setdefault(url, ServerState(url)).draining = False

    def drain(self, url: str) -> None:
        """Give a server nothing more; it is forgotten once its work in flight has ended."""
        server = self._servers.get(url)
        if server is not None:
            server.draining = True
            self._forget_if_drained(server)

    def start(self, session: str, now: float, excluded: Collection[str] = ()) -> str | None:
        """Choose a server for a request, pin the session there and count the request as in flight."""
        url = decide(self._servers.values(), pinned=self._pins.get(session), now=now, excluded=excluded)
        if url is not None:
            self._pin(session, url)
            self._servers[url].in_flight += 1
        return url

    def end(self, url: str) -> None:
        """A request has ended, in whatever way."""
        server = self._servers[url]
        server.in_flight -= 1
        self._forget_if_drained(server)

    def succeeded(self, url: str) -> None:
        """A server answered: it is healthy."""
        self._servers[url].failures = 0

    def failed(self, url: str, now: float) -> None:
        """A server failed. Requests that fail together count once."""
        server = self._servers[url]
        if server.failures and now < server.retry_at:
            return
        pause = min(self._cooldown_s * 2.0 ** min(server.failures, 30), self._max_cooldown_s)
        server.failures += 1
        server.retry_at = now + pause

    def forget(self, session: str) -> None:
        """A session has ended: its pin no longer counts."""
        url = self._pins.pop(session, None)
        if url in self._servers:
            self._servers[url].sessions -= 1

    def _pin(self, session: str, url: str) -> None:
        if self._pins.get(session) != url:
            self.forget(session)
            self._pins[session] = url
            self._servers[url].sessions += 1
        self._pins.move_to_end(session)
        if len(self._pins) > self._max_sessions:
            self.forget(next(iter(self._pins)))

    def _forget_if_drained(self, server: ServerState) -> None:
        if not server.draining or server.in_flight:
            return
        del self._servers[server.url]
        for session in [session for session, url in self._pins.items() if url == server.url]:
            del self._pins[session]
