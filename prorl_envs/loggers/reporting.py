"""Report of a run to its loggers, while the run goes on. No logger delays or stops the run."""

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence

from prorl_envs.loggers.base import LoggedRun, RunLogger
from prorl_envs.loggers.metrics import run_metrics, sample_metrics, session_metrics
from prorl_envs.rollout.api.summary import Summary
from prorl_envs.runs.statistics import RunSummary

#: Minimum pause between two reports of the statistics of all results: in seconds, and as a multiple of the
#: time that a report takes (0.1 s for 10,000 results).
_PAUSE_S, _PAUSES = 1.0, 20
#: Seconds for which a finished run, and an interrupted run, wait for their loggers.
FINISH_S, INTERRUPTED_S = 60.0, 10.0
#: Maximum number of queued calls of a slow logger. If there are more, the logger has failed.
_MAX_CALLS = 10_000

type Warn = Callable[[str], None]


class RunReport:
    """Loggers of a run.

    Args:
        loggers: the loggers, each with its name on the command line.
        warn: called with one sentence for each logger that fails.
    """

    def __init__(self, loggers: Sequence[tuple[str, RunLogger]], warn: Warn) -> None:
        self._workers = [_Worker(name, logger, warn) for name, logger in loggers]
        self._next = 0.0

    def start(self, run: LoggedRun) -> None:
        """Start all loggers."""
        for worker in self._workers:
            worker.start(run)

    def add(self, summary: Summary, summaries: Collection[Summary]) -> None:
        """Report a result, and from time to time the statistics of all results.

        Args:
            summary: summary of the result.
            summaries: summaries of all results so far.
        """
        if not self._workers:
            return
        metrics = sample_metrics(summary)
        now = time.monotonic()
        if now >= self._next:
            metrics |= run_metrics(summaries)
            done = time.monotonic()
            self._next = done + max(_PAUSE_S, _PAUSES * (done - now))
        self._log(metrics, len(summaries))

    def finish(self, summary: RunSummary | None, summaries: Collection[Summary]) -> None:
        """Report the statistics of all results, and finish. Blocks until the loggers finish or time out.

        Args:
            summary: summary of the run; None if the run was interrupted.
            summaries: summaries of all results.
        """
        if self._workers and summaries:
            self._log(run_metrics(summaries) | (session_metrics(summary) if summary else {}), len(summaries))
        for worker in self._workers:
            worker.finish(summary)
        deadline = time.monotonic() + (INTERRUPTED_S if summary is None else FINISH_S)
        for worker in self._workers:
            worker.wait(deadline - time.monotonic())

    def _log(self, metrics: dict[str, float], step: int) -> None:
        for worker in self._workers:
            worker.log(metrics, step)


class _Worker:
    """Logger in a separate thread, which does not prevent the process from exiting."""

    def __init__(self, name: str, logger: RunLogger, warn: Warn) -> None:
        self._name, self._logger, self._warn = name, logger, warn
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_CALLS)
        self._failed = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"log-{name}", daemon=True)

    def start(self, run: LoggedRun) -> None:
        self._thread.start()
        self._call(lambda: self._logger.start(run))

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._call(lambda: self._logger.log(metrics, step))

    def finish(self, summary: RunSummary | None) -> None:
        self._call(lambda: self._logger.finish(summary))
        self._call(None)

    def wait(self, seconds: float) -> None:
        if self._thread.ident is None:  # the thread was never started
            return
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._fail("it is too slow; its last metrics are missing")

    def _call(self, call: Callable[[], None] | None) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(f"it is too slow: {_MAX_CALLS} calls wait for it")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._failed.locked():
                continue
            try:
                call()
            except Exception as error:  # noqa: BLE001 - a logger of any package, whose failure is reported
                self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, problem: str) -> None:
        """Disable the logger, and warn the user once."""
        if self._failed.acquire(blocking=False):
            self._warn(f"--log {self._name} stopped, the run continues: {problem}")
