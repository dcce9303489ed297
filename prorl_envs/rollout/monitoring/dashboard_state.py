"""Dashboard state of a service: summaries of its last results, and statistics of these results.

Each result is counted once, when it is stored. Views are built on request, and shared by all clients.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from prorl_envs.clock import Clock
from prorl_envs.env.node import MemoryUse, NodeUse
from prorl_envs.rollout.api.dashboard import Bucket, DashboardView, GroupLine, Percentiles, SandboxesView
from prorl_envs.rollout.api.summary import Summary, summarise
from prorl_envs.rollout.api.types import JobState, Result
from prorl_envs.rollout.store.base import deviation
from prorl_envs.rollout.store.sql import SqlStore

#: Seconds of a bucket, and number of buckets.
BUCKET_S, BUCKETS = 10.0, 60
#: Number of last results, and of last calls, that percentiles are computed from.
LAST_RESULTS, LAST_CALLS = 1_000, 5_000
#: Maximum number of listed groups.
GROUPS = 24
#: Minimum seconds between two measurements, and the largest share of time that measuring may take. Slow
#: measurements are made less often.
MEASURE_S, MEASURE_SHARE = 2.0, 0.02

log = logging.getLogger(__name__)


class SandboxMemory:
    """Last measurement of the memory use of sandboxes. Reading it starts the next one if it is due.

    Args:
        clock: measures time.
        measure: measures the service's own machine.
    """

    def __init__(self, clock: Clock, measure: Callable[[], Awaitable[MemoryUse]]) -> None:
        self._clock = clock
        self._measure = measure
        self._last = MemoryUse()
        self._due = 0.0
        self._measuring: asyncio.Task[None] | None = None

    def look(self) -> MemoryUse:
        """Return the last measurement, and start the next one if it is due. Empty on the first call."""
        idle = self._measuring is None or self._measuring.done()
        if idle and self._clock.monotonic() >= self._due:
            self._measuring = asyncio.create_task(self._update())
        return self._last

    async def aclose(self) -> None:
        """Cancel a running measurement."""
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.wait({self._measuring})

    async def _update(self) -> None:
        started = self._clock.monotonic()
        try:
            self._last = await self._measure()
        except OSError as error:
            log.warning("the memory of sandboxes cannot be measured: %s", error)
        now = self._clock.monotonic()
        self._due = now + max(MEASURE_S, (now - started) / MEASURE_SHARE)


class DashboardState:
    """Dashboard state of one service.

    Args:
        clock: measures time.
        store: has the results.
        look: returns the fields of a `DashboardView` that are not about results.
    """

    def __init__(self, clock: Clock, store: SqlStore, look: Callable[[], dict[str, Any]]) -> None:
        self._clock = clock
        self._store = store
        self._look = look
        self._recent: deque[Summary] = deque(maxlen=LAST_RESULTS)
        self._buckets: dict[int, Bucket] = {}
        self._calls: deque[float] = deque(maxlen=LAST_CALLS)
        self._tools: deque[float] = deque(maxlen=LAST_CALLS)
        self._cached: tuple[float, DashboardView] | None = None  # time in seconds, and the view

    async def load(self) -> None:
        """Read the summaries of the last results from before the start."""
        newest = await self._store.newest()
        self._recent.extend(await self._store.summaries(newest - LAST_RESULTS, LAST_RESULTS))

    def observe(self, result: Result) -> None:
        """Count a stored result."""
        summary = summarise(result)
        self._recent.append(summary)
        number = int(self._clock.monotonic() // BUCKET_S)
        bucket = self._buckets.get(number, Bucket())
        counted = {summary.state: getattr(bucket, summary.state) + 1}
        self._buckets[number] = bucket.model_copy(
            update={**counted, "sampled": bucket.sampled + summary.sampled}
        )
        if len(self._buckets) > BUCKETS + 1:
            del self._buckets[next(iter(self._buckets))]
        for turn in (turn for row in result.rows for turn in row.turns):
            self._calls.append(turn.model_s)
            if turn.tools_s:
                self._tools.append(turn.tools_s)

    def view(self, *, fresh_s: float = 0.5) -> DashboardView:
        """Return the state of the service. Calls within `fresh_s` seconds of each other get the same view."""
        now = self._clock.monotonic()
        if self._cached is None or now - self._cached[0] >= fresh_s:
            self._cached = (now, self._view(now))
        return self._cached[1]

    def _view(self, now: float) -> DashboardView:
        last = list(reversed(self._recent))
        rewards = [summary.reward for summary in last if summary.reward is not None]
        bucket = int(now // BUCKET_S)
        return DashboardView(
            time=time.time(),
            history=[
                self._buckets.get(number, Bucket()) for number in range(bucket - BUCKETS + 1, bucket + 1)
            ],
            latency=self._latency(last),
            rewards=_tenths(rewards),
            reward_mean=math.fsum(rewards) / len(rewards) if rewards else None,
            groups=_groups(last),
            **self._look(),
        )

    def _latency(self, summaries: Sequence[Summary]) -> dict[str, Percentiles]:
        done = [summary for summary in summaries if summary.state == JobState.DONE]
        measured: dict[str, Iterable[float]] = {
            "queued": (summary.queued_s for summary in done),
            "init": (summary.init_s for summary in done),
            "run": (summary.run_s for summary in done),
            "eval": (summary.eval_s for summary in done),
            "model_call": self._calls,
            "tools": self._tools,
        }
        return {name: found for name, values in measured.items() if (found := percentiles(values))}


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Return percentiles of these values, by the nearest rank; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Percentiles(p50=at(0.5), p90=at(0.9), p99=at(0.99), count=len(ordered))


def _tenths(rewards: Sequence[float]) -> list[int]:
    counts = [0] * 10
    for reward in rewards:
        counts[min(9, max(0, math.floor(reward * 10)))] += 1
    return counts


def _groups(summaries: Sequence[Summary]) -> list[GroupLine]:
    found: dict[str, list[Summary]] = {}
    for summary in summaries:
        if summary.group_id in found or len(found) < GROUPS:
            found.setdefault(summary.group_id, []).append(summary)
    lines = []
    for group, samples in found.items():
        ordered = sorted(samples, key=lambda summary: summary.sample)
        rewards = [summary.reward for summary in ordered if summary.reward is not None]
        mean = math.fsum(rewards) / len(rewards) if rewards else None
        lines.append(
            GroupLine(
                id=group,
                environment=ordered[0].environment,
                task_id=ordered[0].task_id,
                rewards=[summary.reward for summary in ordered],
                mean=mean,
                std=None if mean is None else deviation(rewards, mean),
            )
        )
    return lines


def sandboxes_view(use: NodeUse, memory: MemoryUse) -> SandboxesView:
    """Return the view of a machine's sandboxes and of its memory."""
    total, available = _memory()
    known = bool(memory.busy or memory.warm)
    return SandboxesView(
        open=use.open,
        warm=use.warm,
        busy=max(0, use.open - use.warm),
        starting=use.starting,
        waiting=use.waiting,
        handed_out=use.handed_out,
        from_pool=use.from_pool,
        failed=use.failed,
        ready_s=use.seconds / use.handed_out if use.handed_out else None,
        busy_bytes=sum(memory.busy.values()) if known else None,
        warm_bytes=sum(memory.warm.values()) if known else None,
        largest_bytes=max([*memory.busy.values(), *memory.warm.values()]) if known else None,
        memory_bytes=total,
        memory_used_bytes=None if total is None or available is None else total - available,
    )


def _memory(path: Path = Path("/proc/meminfo")) -> tuple[int | None, int | None]:
    """Return the total and the available memory of the machine in bytes."""
    try:
        fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        return int(fields["MemTotal"].split()[0]) * 1024, int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None, None
