"""Comparison of routers on simulated model servers: prefix hits, balance of the load, makespan.

python -m bench.router

The bench measures only the routers' decisions: servers, caches and time are simulated from a seed. Our router
is the service's `Router`. A server processes all its requests concurrently, and slows down with their number.
A request must prefill the tokens that its server's prefix cache does not contain. The cache evicts the least
recently used entries.
"""

import argparse
import heapq
import itertools
import random
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from prorl_envs.model.routing.state import Router


@dataclass(frozen=True, slots=True)
class Settings:
    """Parameters of a simulation.

    Args:
        servers: number of servers at the start.
        groups: number of groups.
        samples: number of episodes per group.
        live: number of concurrent episodes.
        prompt: median length of prompts, in tokens.
        turns: median number of turns.
        cache: capacity of a server's prefix cache, in tokens.
        late: number of servers that are added later.
        late_at: time of this addition, in seconds.
        dead: number of servers that fail.
        dead_at: time of this failure, in seconds.
        seed: seed of all random choices.
    """

    servers: int = 16
    groups: int = 1200
    samples: int = 8
    live: int = 1600
    prompt: int = 1340
    turns: int = 10
    cache: int = 2_500_000
    late: int = 2
    late_at: float = 400.0
    dead: int = 1
    dead_at: float = 900.0
    seed: int = 1


#: Seconds per decoded token on an idle server, and the increase per request in flight.
DECODE_S, DECODE_SHARE_S = 0.015, 0.0004
#: Work per prefilled token, in decoded tokens.
PREFILL = 0.02


@dataclass(slots=True)
class Episode:
    """One job.

    Args:
        prompt: length of the prompt, which is the same for the whole group, in tokens.
        turns: for each turn the number of sampled tokens, of observed tokens, and the seconds of its tools.
        turn: number of completed turns.
        tokens: current length of the context.
    """

    group: int
    sample: int
    prompt: int
    turns: list[tuple[int, int, float]]
    turn: int = 0
    tokens: int = 0

    @property
    def name(self) -> str:
        return f"g{self.group}/{self.sample}"


def episodes(settings: Settings) -> Iterator[Episode]:
    """Return the jobs in the order in which they start. Lengths, turns and tool times have heavy tails."""
    chance = random.Random(settings.seed)
    for group in range(settings.groups):
        prompt = 400 + min(int(settings.prompt * chance.lognormvariate(0.0, 0.6)), 32_000)
        hard = settings.turns * chance.lognormvariate(0.0, 0.5)  # approximate number of turns of this task
        for sample in range(settings.samples):
            count = max(1, min(int(hard * chance.lognormvariate(0.0, 0.4)), 80))
            turns = [
                (
                    max(4, min(int(chance.lognormvariate(5.0, 0.9)), 4096)),
                    max(4, min(int(chance.lognormvariate(5.3, 1.1)), 8192)),
                    min(chance.lognormvariate(0.0, 1.3), 120.0),
                )
                for _ in range(count)
            ]
            yield Episode(group, sample, prompt, turns, tokens=prompt)


class Cache:
    """A server's prefix cache: prompts of groups and their continuations, by session."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._cached: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._total = 0

    def use(self, episode: Episode) -> int:
        """Return the number of cached tokens of the episode's context, then cache the whole context."""
        continuation, prompt = (episode.group, episode.sample), (episode.group, -1)
        found = self._cached.get(prompt, 0)
        if found:
            found += self._cached.get(continuation, 0)
        self.hold(episode)
        return min(found, episode.tokens)

    def hold(self, episode: Episode) -> None:
        """Cache the episode's whole context."""
        continuation, prompt = (episode.group, episode.sample), (episode.group, -1)
        for key, tokens in ((continuation, episode.tokens - episode.prompt), (prompt, episode.prompt)):
            self._total += tokens - self._cached.pop(key, 0)
            self._cached[key] = tokens
        while self._total > self._capacity:
            self._total -= self._cached.popitem(last=False)[1]


class Server:
    """Simulated server of concurrent requests. `worked` is the work per request since the start."""

    def __init__(self, url: str, cache: int) -> None:
        self.url = url
        self.cache = Cache(cache)
        self.active: list[tuple[float, int, Episode]] = []
        self.worked = 0.0
        self.since = 0.0
        self.version = 0

    def advance(self, now: float) -> None:
        self.worked += (now - self.since) / self._seconds()
        self.since = now

    def next_end(self) -> float | None:
        if not self.active:
            return None
        return self.since + max(0.0, self.active[0][0] - self.worked) * self._seconds()

    def _seconds(self) -> float:
        """Return the seconds per unit of work."""
        return DECODE_S + DECODE_SHARE_S * len(self.active)


class Policy(Protocol):
    """Interface of routers in the simulation."""

    def add(self, url: str) -> None: ...
    def remove(self, url: str) -> None: ...
    def start(self, episode: Episode, now: float) -> str: ...
    def end(self, episode: Episode, url: str) -> None: ...
    def forget(self, episode: Episode) -> None: ...


class _Known:
    """Common state of the simple routers: the servers, and the server of each session."""

    def __init__(self) -> None:
        self.load: dict[str, int] = {}
        self.pins: dict[str, str] = {}

    def add(self, url: str) -> None:
        self.load[url] = 0

    def remove(self, url: str) -> None:
        del self.load[url]

    def start(self, episode: Episode, now: float) -> str:
        url = self.choose(episode)
        self.load[url] += 1
        return url

    def choose(self, episode: Episode) -> str:
        raise NotImplementedError

    def end(self, episode: Episode, url: str) -> None:
        if url in self.load:
            self.load[url] -= 1

    def forget(self, episode: Episode) -> None:
        self.pins.pop(episode.name, None)

    def pinned(self, episode: Episode, otherwise: Callable[[], str]) -> str:
        if self.pins.get(episode.name) not in self.load:
            self.pins[episode.name] = otherwise()
        return self.pins[episode.name]


class RoundRobin(_Known):
    """Router that sends each call to the next server."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = itertools.count()

    def choose(self, episode: Episode) -> str:
        urls = list(self.load)
        return urls[next(self._calls) % len(urls)]


class LeastLoaded(_Known):
    """Router that sends each call to the server with the fewest calls in flight."""

    def choose(self, episode: Episode) -> str:
        return min(self.load, key=self.load.__getitem__)


class StickyLeastLoaded(_Known):
    """Router with sticky sessions; a session starts on the server with the fewest calls in flight."""

    def choose(self, episode: Episode) -> str:
        return self.pinned(episode, lambda: min(self.load, key=self.load.__getitem__))


class CumulativeHeap(_Known):
    """Router of the paper's published code: sticky sessions; a session starts on the server that has had the
    fewest sessions."""

    def __init__(self) -> None:
        super().__init__()
        self._ever: dict[str, int] = {}

    def choose(self, episode: Episode) -> str:
        url = self.pinned(episode, lambda: min(self.load, key=lambda url: self._ever.get(url, 0)))
        if episode.turn == 0:
            self._ever[url] = self._ever.get(url, 0) + 1
        return url


class ConsistentHashing(_Known):
    """Router with consistent hashing of the session's name, on a ring with 100 points per server."""

    def choose(self, episode: Episode) -> str:
        ring = self._ring()
        return ring[bisect(ring, (_hash(episode.name), "")) % len(ring)][1]

    def add(self, url: str) -> None:
        super().add(url)
        self._points: list[tuple[int, str]] = []

    def remove(self, url: str) -> None:
        super().remove(url)
        self._points = []

    def _ring(self) -> list[tuple[int, str]]:
        if not self._points:
            self._points = sorted((_hash(f"{url}#{n}"), url) for url in self.load for n in range(100))
        return self._points


class PerfectAffinity(_Known):
    """Router that sends all calls of a group to one server, regardless of the load. It has the highest
    possible rate of prefix hits."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[int, str] = {}

    def choose(self, episode: Episode) -> str:
        if self._groups.get(episode.group) not in self.load:
            self._groups[episode.group] = min(self.load, key=self.load.__getitem__)
        return self._groups[episode.group]


class Ours:
    """The service's router."""

    def __init__(self) -> None:
        self.router = Router()

    def add(self, url: str) -> None:
        self.router.add(url)

    def remove(self, url: str) -> None:
        self.router.failed(url, 0.0)
        self.router.drain(url)

    def start(self, episode: Episode, now: float) -> str:
        url = self.router.start(episode.name, now, tokens=episode.tokens)
        assert url is not None
        return url

    def end(self, episode: Episode, url: str) -> None:
        self.router.end(url)

    def forget(self, episode: Episode) -> None:
        self.router.forget(episode.name)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(slots=True)
class Outcome:
    """Results of a run.

    Args:
        prompt: number of tokens in all prompts.
        hit: number of these tokens that were cached.
        turns: number of started turns, including repeated ones.
        spreads: highest load of a server divided by the mean load, and the seconds with this ratio; only
            while jobs are waiting.
        late_seen: load of an added server divided by the mean load, and the seconds with this ratio, 15 to 60
            seconds after the addition.
        late_peak: the largest ratio of `late_seen`, but from the addition on.
        makespan: seconds until all jobs are done.
    """

    prompt: int = 0
    hit: int = 0
    turns: int = 0
    spreads: list[tuple[float, float]] = field(default_factory=list)
    late_seen: list[tuple[float, float]] = field(default_factory=list)
    late_peak: float = 0.0
    makespan: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.hit / self.prompt

    @property
    def spread(self) -> float:
        return _mean(self.spreads)

    @property
    def worst(self) -> float:
        return _percentile(self.spreads, 0.95)

    @property
    def late(self) -> float:
        return _mean(self.late_seen)


def _mean(weighted: list[tuple[float, float]]) -> float:
    total = sum(seconds for _, seconds in weighted)
    return sum(value * seconds for value, seconds in weighted) / total if total else float("nan")


def _percentile(weighted: list[tuple[float, float]], share: float) -> float:
    remaining = share * sum(seconds for _, seconds in weighted)
    for value, seconds in sorted(weighted):
        remaining -= seconds
        if remaining <= 0:
            return value
    return float("nan")


class Simulation:
    """Simulation of one router with one workload."""

    def __init__(self, settings: Settings, policy: Policy) -> None:
        self.settings = settings
        self.policy = policy
        self.outcome = Outcome()
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._servers: dict[str, Server] = {}
        self._late: set[str] = set()
        self._waiting = episodes(settings)
        self._more = True
        self._looked = 0.0

    def run(self) -> Outcome:
        """Run until all jobs are done."""
        for number in range(self.settings.servers):
            self._add(f"s{number}")
        self._at(self.settings.late_at, self._add_late)
        self._at(self.settings.dead_at, self._kill)
        for _ in range(self.settings.live):
            self._begin()
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.outcome

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _add(self, url: str) -> None:
        self._servers[url] = Server(url, self.settings.cache)
        self._servers[url].since = self.now
        self.policy.add(url)

    def _add_late(self) -> None:
        for number in range(self.settings.late):
            self._late.add(f"late{number}")
            self._add(f"late{number}")

    def _kill(self) -> None:
        for number in range(self.settings.dead):
            self._look()
            server = self._servers.pop(f"s{number}")
            server.version += 1
            self.policy.remove(server.url)
            for _, _, episode in server.active:  # another server gets the request
                self.policy.end(episode, server.url)
                self._start(episode)

    def _begin(self) -> None:
        episode = next(self._waiting, None)
        if episode is None:
            self._more = False
        else:
            self._start(episode)

    def _start(self, episode: Episode) -> None:
        self._look()
        server = self._servers[self.policy.start(episode, self.now)]
        found = server.cache.use(episode)
        self.outcome.prompt += episode.tokens
        self.outcome.hit += found
        self.outcome.turns += 1
        server.advance(self.now)
        work = episode.turns[episode.turn][0] + PREFILL * (episode.tokens - found)
        heapq.heappush(server.active, (server.worked + work, next(self._order), episode))
        self._plan(server)

    def _plan(self, server: Server) -> None:
        server.version += 1
        version, end = server.version, server.next_end()
        if end is not None:
            self._at(end, lambda: self._ended(server, version))

    def _ended(self, server: Server, version: int) -> None:
        if version != server.version:
            return
        self._look()
        server.advance(self.now)
        _, _, episode = heapq.heappop(server.active)
        self._plan(server)
        self.policy.end(episode, server.url)
        sampled, observed, tools_s = episode.turns[episode.turn]
        episode.tokens += sampled
        server.cache.hold(episode)
        episode.tokens += observed
        episode.turn += 1
        self.outcome.makespan = self.now
        if episode.turn < len(episode.turns):
            self._at(self.now + tools_s, lambda: self._start(episode))
        else:
            self.policy.forget(episode)
            self._begin()

    def _look(self) -> None:
        """Record the loads of the servers since the last call; they do not change between two calls."""
        seconds, self._looked = self.now - self._looked, self.now
        loads = [len(server.active) for server in self._servers.values()]
        mean = sum(loads) / len(loads)
        if not self._more or seconds <= 0 or self.now < 60 or not mean:
            return
        if not 0 <= self.now - self.settings.late_at < 60:  # a late server is counted separately
            self.outcome.spreads.append((max(loads) / mean, seconds))
        elif self._late:
            share = sum(len(self._servers[url].active) for url in self._late) / len(self._late) / mean
            self.outcome.late_peak = max(self.outcome.late_peak, share)
            if self.now - self.settings.late_at >= 15:
                self.outcome.late_seen.append((share, seconds))


ROUTERS: dict[str, Callable[[], Policy]] = {
    "perfect affinity": PerfectAffinity,
    "**ours**": Ours,
    "sticky, least loaded": StickyLeastLoaded,
    "the paper's cumulative heap": CumulativeHeap,
    "consistent hashing": ConsistentHashing,
    "least loaded, each call": LeastLoaded,
    "round robin, each call": RoundRobin,
}


def table(settings: Settings) -> str:
    """Simulate all routers, and format the results as Markdown with one row per router."""
    lines = [
        "| router | prefix hits | of perfect affinity | max/mean in flight | 95th percentile"
        " | late server's share, 15-60 s (peak) | makespan s |",
        "|---|---|---|---|---|---|---|",
    ]
    perfect = 0.0
    for name, make in ROUTERS.items():
        outcome = Simulation(settings, make()).run()
        perfect = perfect or outcome.hit_rate
        lines.append(
            f"| {name} | {outcome.hit_rate:.2%} | {outcome.hit_rate / perfect:.2%} | {outcome.spread:.3f}"
            f" | {outcome.worst:.3f} | {outcome.late:.2f} ({outcome.late_peak:.2f})"
            f" | {outcome.makespan:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name in ("servers", "groups", "samples", "live", "prompt", "turns", "cache", "late", "dead", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Settings(), name))
    options = parser.parse_args()
    print(table(Settings(**vars(options))))


if __name__ == "__main__":
    main()
