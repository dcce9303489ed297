"""Simulated model calls of concurrent episodes, and measurement of the gaps between the calls.

This module imports nothing of the package, because peers use it with their own interpreter.
"""

import random
import statistics
import threading
import time
from dataclasses import dataclass, field

from bench.memory import Memory

#: Shortest and longest duration of a model call, in seconds.
CALL_S = (2.0, 4.0)


@dataclass(slots=True)
class Measurements:
    """Measurements of concurrent episodes.

    Args:
        gaps: seconds between two model calls of an episode.
        model_s: seconds of all model calls.
        late_gaps, late_model_s: the same, after every episode has started.
        begun_s: seconds until every episode has started its first model call.
        cpu_s: processor time of the process that runs the episodes, without their sandboxes.
        memory: decrease of the machine's available memory until all episodes have started, in bytes.
    """

    gaps: list[float] = field(default_factory=list)
    model_s: float = 0.0
    late_gaps: list[float] = field(default_factory=list)
    late_model_s: float = 0.0
    begun_s: float = 0.0
    cpu_s: float = 0.0
    memory: int = 0

    def row(self, name: str, count: int) -> str:
        """Return a row of the table."""
        cuts = statistics.quantiles(self.gaps, n=100)
        cells = [
            f"{sum(self.gaps) / self.model_s:.2%}",
            f"{sum(self.late_gaps) / self.late_model_s:.2%}" if self.late_model_s else "",
            f"{cuts[49] * 1e3:.1f}",
            f"{cuts[98] * 1e3:.1f}",
            f"{self.begun_s:.1f}",
            f"{self.cpu_s / count * 1e3:.0f}",
            f"{self.memory / 1e6:.0f}",
        ]
        return f"| {name} | {count:,} | {' | '.join(cells)} |"


class SlowCalls:
    """Simulated times of the episodes' model calls. The measurement starts with the creation. Thread-safe.

    Args:
        count: number of episodes.
    """

    def __init__(self, count: int) -> None:
        self.measured = Measurements()
        self._count = count
        self._ends: dict[str, float] = {}
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._start, self._start_cpu = time.perf_counter(), time.process_time()
        self._available = Memory.now().available

    def begin(self, episode: str) -> float:
        """Start the episode's next call. Return its planned end, in seconds of `time.perf_counter`."""
        with self._lock:
            now, duration = time.perf_counter(), self._random.uniform(*CALL_S)
            measured = self.measured
            if episode in self._ends:
                measured.gaps.append(now - self._ends[episode])
                if measured.begun_s:
                    measured.late_gaps.append(now - self._ends[episode])
                    measured.late_model_s += duration
            end = self._ends[episode] = now + duration
            measured.model_s += duration
            if len(self._ends) == self._count and not measured.begun_s:
                measured.begun_s = now - self._start
                measured.memory = self._available - Memory.now().available
            return end

    def finish(self) -> Measurements:
        """Return the measurements. Call this method after the end of all episodes."""
        self.measured.cpu_s = time.process_time() - self._start_cpu
        return self.measured
