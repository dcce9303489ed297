"""State of servers, sessions and groups, without I/O, so that synchronous tests cover every race."""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace

from prorl_envs.model.routing.balance import ServerState, decide


@dataclass(slots=True)
class _Pin:
    """Pin of a session to a server, which presumably caches `tokens` tokens of the session."""

    url: str
    tokens: int = 0


@dataclass(slots=True)
class RouterCounts:
    """Counts of the router.

    Args:
        turns: requests that were routed.
        prompt_tokens: prompt tokens of these requests.
        expected_hits: prompt tokens that the chosen server should have cached, by the router's own records.
        reported_prompt_tokens, reported_hits: prompt tokens and cache hits of servers that report their hits.
        rebalanced: number of times that a session left a server for balance.
        failed_over: number of times that a session left a server that failed or was drained.
    """

    turns: int = 0
    prompt_tokens: int = 0
    expected_hits: int = 0
    reported_prompt_tokens: int = 0
    reported_hits: int = 0
    rebalanced: int = 0
    failed_over: int = 0


@dataclass(slots=True, kw_only=True)
class RouterSnapshot(RouterCounts):
    """Counts and states of the router at one moment.

    Args:
        servers: copies of the servers' states.
        load_imbalance: maximum over mean of the servers' requests in flight; 1.0 if all are idle.
    """

    servers: tuple[ServerState, ...]
    load_imbalance: float


@dataclass(slots=True)
class _Group:
    """Prompt of a group: its tokens, and the servers that have read it."""

    tokens: int
    urls: set[str] = field(default_factory=set)


class Router:
    """State that `decide` works on.

    Args:
        max_sessions: maximum pins, and maximum groups; the longest idle are dropped first.
        cooldown_s: seconds for which a failed server gets no turn; doubles with each further failure.
        max_cooldown_s: maximum of these seconds.
    """

    def __init__(
        self,
        *,
        max_sessions: int = 65_536,
        cooldown_s: float = 2.0,
        max_cooldown_s: float = 60.0,
    ) -> None:
        self._max_sessions = max_sessions
        self._cooldown_s = cooldown_s
        self._max_cooldown_s = max_cooldown_s
        self._servers: dict[str, ServerState] = {}
        self._pins: OrderedDict[str, _Pin] = OrderedDict()
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._counts = RouterCounts()
        self._mean_tokens = 0.0  # moving average of the prompt length in tokens

    @property
    def servers(self) -> tuple[ServerState, ...]:
        """All servers, including draining servers, in the order they were added."""
        return tuple(self._servers.values())

    def snapshot(self) -> RouterSnapshot:
        """Return the counts and the servers' states."""
        loads = [server.in_flight for server in self._servers.values() if not server.draining]
        mean = sum(loads) / len(loads) if loads else 0.0
        return RouterSnapshot(
            **asdict(self._counts),
            servers=tuple(
                replace(server, window=replace(server.window)) for server in self._servers.values()
            ),
            load_imbalance=max(loads) / mean if mean else 1.0,
        )

    def add(self, url: str, *, version: str = "") -> None:
        """Add a server; a draining server is readmitted.

        Args:
            url: base URL of the server.
            version: version of its weights, until the server reports one.
        """
        late = any(server.turns for server in self._servers.values())
        self._servers.setdefault(url, ServerState(url, joining=late, weight_version=version)).draining = False

    def drain(self, url: str) -> None:
        """Send a server no more turns; remove it once its work in flight has finished."""
        server = self._servers.get(url)
        if server is not None:
            server.draining = True
            self._forget_if_drained(server)

    def start(
        self, session: str, now: float, excluded: Collection[str] = (), *, tokens: int = 0
    ) -> str | None:
        """Choose a server for a request, pin the session there and count the request as in flight.

        Args:
            session: `<group>/<sample>`, or any name for a session without siblings.
            now: monotonic seconds.
            excluded: URLs on which this request has already failed.
            tokens: length of the prompt.
        """
        pin, group = self._pins.get(session), self._groups.get(_group_of(session))
        url = decide(
            self._servers.values(),
            pinned=pin.url if pin else None,
            now=now,
            excluded=excluded,
            warm=group.urls if group else (),
            weight=tokens / (2 * self._mean_tokens) if self._mean_tokens else 1.0,
        )
        if url is None:
            return None
        self._record_choice(session, url, excluded, tokens)
        server = self._servers[url]
        server.in_flight += 1
        server.turns += 1
        if server.joining:
            ready = [other.in_flight for other in self._servers.values() if other.ready(now)]
            server.joining = server.in_flight < sum(ready) / max(len(ready), 1)
        return url

    def saturated(self, now: float, excluded: Collection[str] = ()) -> bool:
        """Return true if every ready server is full."""
        usable = [s for s in self._servers.values() if not s.draining and s.url not in excluded]
        ready = [server for server in usable if server.ready(now)]
        return bool(ready) and all(server.full for server in ready)

    def complained(self, url: str, now: float) -> None:
        """Record that a server reported overload."""
        server = self._servers[url]
        server.window.complained(server.in_flight, now)

    def end(self, url: str) -> None:
        """Count a request as finished, with any outcome."""
        server = self._servers[url]
        server.in_flight -= 1
        self._forget_if_drained(server)

    def succeeded(self, url: str, *, tokens: int = 0, cached: int | None = None, version: str = "") -> None:
        """Record that a server answered a turn: it is healthy.

        Args:
            tokens: length of the prompt.
            cached: prompt tokens that the server reports as cached; None if it does not report them.
            version: version of the weights that sampled the answer.
        """
        server = self._servers[url]
        self._recovered(server, version)
        server.sampled, server.refused = True, False
        server.window.answered(server.in_flight)
        if cached is not None:
            self._counts.reported_prompt_tokens += tokens
            self._counts.reported_hits += cached

    def checked(self, url: str, *, version: str = "") -> None:
        """Record an answered health check. A server that refused a turn stays failing until it answers one.

        Args:
            version: version of its weights.
        """
        server = self._servers[url]
        if not server.refused:
            self._recovered(server, version)

    def failed(self, url: str, now: float, *, problem: str = "", refused: bool = False) -> None:
        """Record that a server failed. Requests that fail together count once.

        Args:
            problem: message of the failure.
            refused: True if the server refused the route of a turn.
        """
        server = self._servers[url]
        server.problem, server.refused = problem, server.refused or refused
        if server.failures and now < server.retry_at:
            return
        pause = min(self._cooldown_s * 2.0 ** min(server.failures, 30), self._max_cooldown_s)
        server.failures += 1
        server.retry_at = now + pause
        server.joining = True  # after its recovery: its sessions have moved elsewhere

    def forget(self, session: str) -> None:
        """Drop the pin of a closed session."""
        pin = self._pins.pop(session, None)
        if pin is not None and pin.url in self._servers:
            self._servers[pin.url].sessions -= 1

    def forget_prefixes(self) -> None:
        """Assume empty prefix caches, because the weights changed. Sessions keep their servers."""
        self._groups.clear()
        for pin in self._pins.values():
            pin.tokens = 0

    @staticmethod
    def _recovered(server: ServerState, version: str) -> None:
        server.failures, server.problem, server.answered = 0, "", True
        server.weight_version = version or server.weight_version

    def _record_choice(self, session: str, url: str, excluded: Collection[str], tokens: int) -> None:
        """Record a choice in the counts, the pins and the groups."""
        pin, counts = self._pins.get(session), self._counts
        name = _group_of(session)
        group = self._groups.get(name)
        counts.turns += 1
        counts.prompt_tokens += tokens
        if pin is not None and pin.url == url:
            counts.expected_hits += min(pin.tokens, tokens)
        elif group is not None and url in group.urls:
            counts.expected_hits += min(group.tokens, tokens)
        if pin is not None and pin.url != url:
            old = self._servers.get(pin.url)
            healthy = old is not None and not old.draining and pin.url not in excluded and not old.failures
            counts.rebalanced += healthy
            counts.failed_over += not healthy
        self._mean_tokens += (tokens - self._mean_tokens) * (0.01 if self._mean_tokens else 1.0)
        self._pin(session, url).tokens = tokens
        if name:
            self._record_prefix(name, url, tokens, first=pin is None)

    def _record_prefix(self, name: str, url: str, tokens: int, *, first: bool) -> None:
        group = self._groups.setdefault(name, _Group(tokens))
        if first:
            group.tokens = min(group.tokens, tokens)
        group.urls.add(url)
        self._groups.move_to_end(name)
        if len(self._groups) > self._max_sessions:
            self._groups.popitem(last=False)

    def _pin(self, session: str, url: str) -> _Pin:
        if session not in self._pins or self._pins[session].url != url:
            self.forget(session)
            self._pins[session] = _Pin(url)
            self._servers[url].sessions += 1
        self._pins.move_to_end(session)
        pin = self._pins[session]
        if len(self._pins) > self._max_sessions:
            self.forget(next(iter(self._pins)))
        return pin

    def _forget_if_drained(self, server: ServerState) -> None:
        if not server.draining or server.in_flight:
            return
        del self._servers[server.url]
        for session in [session for session, pin in self._pins.items() if pin.url == server.url]:
            del self._pins[session]
        for group in self._groups.values():
            group.urls.discard(server.url)


def _group_of(session: str) -> str:
    """Return the group of `<group>/<sample>`; "" if there is none."""
    return session.rpartition("/")[0]
