"""Metrics of results, and calls of loggers."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from prorl_envs.loggers import reporting
from prorl_envs.loggers.base import LoggedRun
from prorl_envs.loggers.metrics import run_metrics, sample_metrics, session_metrics
from prorl_envs.loggers.reporting import RunReport
from prorl_envs.rollout.api.summary import Summary, summarise
from prorl_envs.runs.statistics import RunSummary, statistics_of
from tests.viewer.conftest import result

FAILURE = {"kind": "sandbox", "stage": "init", "message": "no"}
SUMMARIES = [
    summarise(one)
    for one in (
        result("a/0"),
        result("a/1", reward=0.0),
        result("b/0", environment="math", task_id="sum"),
        result("b/1", environment="math", task_id="sum", state="failed", reward=None, failure=FAILURE),
    )
]
SUMMARY = RunSummary(
    environment="bash", model="m", started="now", expected=4, wall_s=2.0, sampled_tokens_per_s=12.0,
    overall=statistics_of(SUMMARIES), environments={},
)  # fmt: skip


def run(folder: Path) -> LoggedRun:
    return LoggedRun(
        name="r", environment="bash", model="m", started="now", version="1", folder=folder, samples=4,
        sampling={}, limits={},
    )  # fmt: skip


def test_metrics_equal_the_statistics() -> None:
    metrics = run_metrics(SUMMARIES)
    assert metrics["mean_reward"] == pytest.approx(2 / 3)
    assert metrics["standard_error"] == statistics_of(SUMMARIES).standard_error
    assert (metrics["pass_at/1"], metrics["pass_at/2"]) == (0.75, 1.0)
    assert (metrics["failures/all"], metrics["failures/sandbox"], metrics["results"]) == (1, 1, 4)
    assert (metrics["turns"], metrics["sampled_tokens"], metrics["model_s"]) == (2, 24, 1.0)
    assert metrics["environments/bash/mean_reward"] == 0.5
    assert metrics["environments/math/failures/sandbox"] == 1
    assert "environments/bash/failures/sandbox" not in metrics
    assert session_metrics(SUMMARY) == {"wall_s": 2.0, "sampled_tokens_per_s": 12.0}


def test_a_sample_without_a_reward_has_no_reward() -> None:
    done, failed = sample_metrics(SUMMARIES[0]), sample_metrics(SUMMARIES[3])
    assert (done["sample/reward"], done["sample/failed"], done["sample/turns"]) == (1.0, 0.0, 2.0)
    assert "sample/reward" not in failed and failed["sample/failed"] == 1.0


class Recorder:
    """A logger that records its calls, and fails or waits on demand."""

    def __init__(self, fail_in: str = "", gate: threading.Event | None = None) -> None:
        self.calls: list[str] = []
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.threads: set[int] = set()
        self._fail_in, self._gate = fail_in, gate

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.get_ident())
        if self._gate is not None:
            self._gate.wait(30)
        if name == self._fail_in:
            raise ValueError(f"cannot {name}")

    def start(self, run: LoggedRun) -> None:
        self._called("start")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._called("log")
        self.logged.append((step, metrics))

    def finish(self, summary: RunSummary | None) -> None:
        self._called("finish" if summary is not None else "interrupted")


def reported(folder: Path, *loggers: Recorder, summary: RunSummary | None = SUMMARY) -> list[str]:
    """Report a run to loggers. Return the warnings."""
    warnings: list[str] = []
    report = RunReport([(f"l{number}", one) for number, one in enumerate(loggers)], warnings.append)
    report.start(run(folder))
    for count, one in enumerate(SUMMARIES, start=1):
        report.add(one, SUMMARIES[:count])
    report.finish(summary, SUMMARIES)
    return warnings


def test_each_result_is_a_step_and_the_last_call_has_all(tmp_path: Path) -> None:
    logger = Recorder()
    assert reported(tmp_path, logger) == []
    assert [step for step, _ in logger.logged] == [1, 2, 3, 4, 4]
    assert logger.logged[0][1]["mean_reward"] == 1.0 and logger.logged[0][1]["sample/reward"] == 1.0
    assert "mean_reward" not in logger.logged[1][1], "statistics of all results are not made for each"
    assert logger.logged[-1][1] == run_metrics(SUMMARIES) | session_metrics(SUMMARY)
    assert logger.calls[0] == "start" and logger.calls[-1] == "finish"
    assert len(logger.threads) == 1 and threading.get_ident() not in logger.threads


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_failing_logger_gives_one_warning_and_the_others_continue(tmp_path: Path, method: str) -> None:
    failing, other = Recorder(method), Recorder()
    warnings = reported(tmp_path, failing, other)
    assert warnings == [f"--log l0 stopped, the run continues: ValueError: cannot {method}"]
    assert failing.calls.count(method) == 1 and failing.calls[-1] == method
    assert other.calls == ["start", *["log"] * 5, "finish"]


def test_an_interrupted_run_is_reported_as_such(tmp_path: Path) -> None:
    logger = Recorder()
    assert reported(tmp_path, logger, summary=None) == []
    assert logger.calls[-1] == "interrupted" and "wall_s" not in logger.logged[-1][1]


def test_a_hanging_logger_delays_only_the_end_and_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "FINISH_S", 0.2)
    gate = threading.Event()
    hanging, other = Recorder(gate=gate), Recorder()
    before = time.monotonic()
    warnings = reported(tmp_path, hanging, other)
    assert time.monotonic() - before < 10
    assert warnings == ["--log l0 stopped, the run continues: it is too slow; its last metrics are missing"]
    assert other.calls[-1] == "finish"
    gate.set()


def test_a_slow_logger_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "_MAX_CALLS", 2)
    monkeypatch.setattr(reporting, "FINISH_S", 0.1)
    gate = threading.Event()
    assert len(warnings := reported(tmp_path, Recorder(gate=gate))) == 1
    assert "it is too slow: 2 calls wait for it" in warnings[0]
    gate.set()


def test_nothing_is_computed_without_loggers(tmp_path: Path) -> None:
    unusable: list[Summary] = [None]  # type: ignore[list-item]
    report = RunReport([], lambda _: None)
    report.start(run(tmp_path))
    report.add(unusable[0], unusable)
    report.finish(SUMMARY, unusable)
