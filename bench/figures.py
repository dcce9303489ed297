"""Measurements of the figures. The subjects of a figure run in alternation."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import catalogue
from bench.catalogue import Entry
from bench.memory import Memory, pss
from bench.process import SubjectError, SubjectProcess
from bench.results import Row
from tests.support.leaks import OpenResources, leaks_since

ANSWER_TIMEOUT_S = 120.0
OPEN_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Numbers and durations of the measurements.

    Args:
        rounds: turns of each subject.
        batch: largest number of actions per turn.
        turn_s: seconds after which a turn ends.
        starts: largest number of new sandboxes or sessions per turn.
        sessions: concurrent sessions for the measurement of rates.
        rate_rounds: turns for the measurement of rates.
        rate_s: seconds of each of these turns.
        idle: idle sandboxes for the measurement of memory.
        live: idle sandboxes that must work at the same time.
    """

    rounds: int = 30
    batch: int = 25
    turn_s: float = 0.5
    starts: int = 3
    sessions: int = 32
    rate_rounds: int = 3
    rate_s: float = 1.5
    idle: int = 50
    live: int = 1000


@dataclass(frozen=True, slots=True)
class Bench:
    """Runner of figures.

    Args:
        scratch: an existing directory with a short path, because it contains sockets.
        image: path of a SIF, or None if no SIF can be built.
        no_image: reason why there is no SIF.
        chosen: returns whether to measure a subject.
        say: called with progress messages.
    """

    scale: Scale
    scratch: Path
    image: Path | None
    no_image: str
    chosen: Callable[[Entry], bool]
    say: Callable[[str], None]

    def bash(self) -> dict[str, Row]:
        """Measure figure 1: an action, and many concurrent sessions."""
        with self._running("bash", catalogue.BASH) as running:
            self._together(running, "open", count=1)
            self._rounds(running, "act", "seconds", self.scale.batch)
            self._together(running, "shut")
            self.say(f"bash: opening {self.scale.sessions} sessions each")
            self._together(running, "open", count=self.scale.sessions)
            self.say("bash: measuring")
            for _ in range(self.scale.rate_rounds):
                self._turns(running, _rate(self.scale.rate_s))
            self._together(running, "shut")
        return {row.entry.key: row for row in running.rows}

    def ready(self) -> dict[str, Row]:
        """Measure figure 2: a new sandbox, up to its first answer."""
        with self._running("ready", catalogue.READY) as running:
            self._rounds(running, "ready", "ready", self.scale.starts)
        return {row.entry.key: row for row in running.rows}

    def cell(self) -> dict[str, Row]:
        """Measure figure 4: a Python cell, and a new session up to its first answer."""
        with self._running("cell", catalogue.CELL) as running:
            self._together(running, "open", count=1)
            self._rounds(running, "act", "seconds", self.scale.batch)
            self._together(running, "shut")
            self._rounds(running, "ready", "ready", self.scale.starts)
        return {row.entry.key: row for row in running.rows}

    def memory(self) -> dict[str, Row]:
        """Measure figure 3: memory, one subject after the other, because they would share memory."""
        rows = {}
        for entry in filter(self.chosen, catalogue.IDLE):
            before = OpenResources.now(self.scratch)
            with self._running("memory", [entry]) as running:
                self._turns(running, _idle(self.scale.idle if entry.module == "ours" else 5))
                if entry is catalogue.OURS:
                    self._turns(running, _live(self.scale.live))
            row = rows[entry.key] = running.rows[0]
            row.left += leaks_since(before, self.scratch)
        return rows

    def _rounds(self, running: "_Running", operation: str, values: str, count: int) -> None:
        for number in range(self.scale.rounds + 1):  # the first turn only warms up
            self._turns(running, _time(operation, values, count, self.scale.turn_s, keep=number > 0))

    def _together(
        self, running: "_Running", operation: str, **arguments: int
    ) -> list[tuple[Row, dict[str, Any]]]:
        """Run an operation in all subjects at the same time, without measuring it."""
        answers = []

        def answer(row: Row, process: SubjectProcess) -> None:
            answers.append((row, process.answer(operation, timeout_s=OPEN_TIMEOUT_S)))

        self._turns(running, lambda row, process: process.tell(operation, **arguments))
        self._turns(running, answer)
        return answers

    def _turns(self, running: "_Running", step: "Step") -> None:
        for row, process in running.alive():
            try:
                step(row, process)
            except SubjectError as error:
                row.failed = str(error)
                self.say(f"  {row.entry.key}: {error}")

    @contextlib.contextmanager
    def _running(self, figure: str, entries: Sequence[Entry]) -> Iterator["_Running"]:
        """Start the subjects of a figure, and close them at the end."""
        running = _Running([], [])
        self.say(f"{figure}: starting")
        try:
            for entry in filter(self.chosen, entries):
                running.rows.append(row := Row(entry))
                running.processes.append(self._start(row))
            for row, answer in self._together(running, "prepare"):
                row.version = answer["version"]
            self.say(f"{figure}: measuring")
            yield running
        finally:
            for process in running.processes:
                if process is not None:
                    process.finish()
            for row, process in zip(running.rows, running.processes, strict=True):
                if process is not None:
                    row.left += process.close()

    def _start(self, row: Row) -> SubjectProcess | None:
        try:
            if row.entry.image and self.image is None:
                raise SubjectError(self.no_image)
            return SubjectProcess(row.entry, Path(tempfile.mkdtemp(dir=self.scratch)), self.image)
        except SubjectError as error:
            row.failed = str(error)
            return None


@dataclass(frozen=True, slots=True)
class _Running:
    rows: list[Row]
    processes: list[SubjectProcess | None]

    def alive(self) -> Iterator[tuple[Row, SubjectProcess]]:
        for row, process in zip(self.rows, self.processes, strict=True):
            if process is not None and not row.failed:
                yield row, process


type Step = Callable[[Row, SubjectProcess], None]


def _time(operation: str, values: str, count: int, budget_s: float, *, keep: bool) -> Step:
    """Time an operation of the subject, and add the seconds to a row's `values` if `keep` is true."""

    def step(row: Row, process: SubjectProcess) -> None:
        answer = process.ask(operation, count=count, budget_s=budget_s, timeout_s=ANSWER_TIMEOUT_S)
        if keep:
            getattr(row, values).extend(answer["seconds"])
            row.wrong += answer["wrong"]
            row.answers += len(answer["seconds"])

    return step


def _rate(budget_s: float) -> Step:
    def step(row: Row, process: SubjectProcess) -> None:
        answer = process.ask("rate", budget_s=budget_s, timeout_s=ANSWER_TIMEOUT_S)
        row.rates.append(answer["rate"])
        row.wrong += answer["wrong"]
        row.answers += answer["answers"]

    return step


def _idle(count: int) -> Step:
    """Measure the memory per idle session. The first one is not counted: it starts shared processes."""

    def step(row: Row, process: SubjectProcess) -> None:
        process.ask("open", count=1, timeout_s=ANSWER_TIMEOUT_S)
        before = Memory.now()
        process.ask("open", count=count, timeout_s=OPEN_TIMEOUT_S)
        after = Memory.now()
        row.memory["sessions"] = count
        row.memory["kernel"] = (after.kernel - before.kernel) / count
        row.memory["all"] = (before.available - after.available) / count
        _count_pss(row, process, "pss", count + 1)
        process.ask("shut", timeout_s=OPEN_TIMEOUT_S)

    return step


def _live(count: int) -> Step:
    def step(row: Row, process: SubjectProcess) -> None:
        before = Memory.now()
        opened = process.ask("open", count=count, timeout_s=OPEN_TIMEOUT_S)
        row.memory["live_start_s"] = opened["seconds"]
        row.memory["live_all"] = before.available - Memory.now().available
        row.memory["live"] = process.ask("answer", timeout_s=OPEN_TIMEOUT_S)["answered"]
        _count_pss(row, process, "live_pss", count)
        row.memory["live_close_s"] = process.ask("shut", timeout_s=OPEN_TIMEOUT_S)["seconds"]

    return step


def _count_pss(row: Row, process: SubjectProcess, name: str, sessions: int) -> None:
    pids = process.ask("pids", timeout_s=ANSWER_TIMEOUT_S)["pids"]
    row.memory["processes"] = len(pids) / sessions
    with contextlib.suppress(PermissionError):  # only root may inspect tool servers
        row.memory[name] = pss(pids) / sessions
