"""Statistics, descriptions and lists of runs, for the viewer."""

import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.summary import Summary
from prorl_envs.rollout.api.types import GroupRequest, WireModel
from prorl_envs.rollout.client.result_files import GROUPS, RESULTS
from prorl_envs.runs.folder import RUN, SUMMARY, RunDescription, read_description, run_groups
from prorl_envs.runs.statistics import RunSummary, Statistics, by_environment, statistics_of
from prorl_envs.viewer.index import Index


class RunOverview(WireModel):
    """State of a run.

    Args:
        description: description of the run; None if the results are not in the folder of a run.
        expected: number of requested samples; None if unknown.
        running: True if a process writes to the run.
        wall_s, sampled_tokens_per_s: values of the last session; None while it is running.
        overall: statistics of all results so far; `environments`: statistics by environment.
    """

    description: RunDescription | None
    expected: int | None
    running: bool
    wall_s: float | None
    sampled_tokens_per_s: float | None
    overall: Statistics
    environments: dict[str, Statistics]


class RunLine(WireModel):
    """Run in a list of runs.

    Args:
        name: name of the run's folder.
        description: description of the run; None if the folder contains only results.
        running: True if a process writes to the run.
        results: number of results; `expected`: number of requested samples, None if unknown.
        overall: statistics of the run; None while a session is running.
    """

    name: str
    description: RunDescription | None
    running: bool
    results: int
    expected: int | None
    overall: Statistics | None


class RunView:
    """Run of a results file. Methods may be called from several threads.

    Args:
        path: folder of the run; None if the results belong to no run.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._groups: dict[str, GroupRequest] = {}
        self._changed = -1

    def overview(self, summaries: Sequence[Summary]) -> Any:
        """Return the statistics of the results and the description of the run, as an object for JSON."""
        summaries = list(summaries)  # a copy, since results may arrive meanwhile
        path = self._path
        summary = _summary(path) if path else None
        running = path is not None and is_running(path)
        ended = summary is not None and not running
        return RunOverview(
            description=_description(path) if path else None,
            expected=self.expected,
            running=running,
            wall_s=summary.wall_s if summary and ended else None,
            sampled_tokens_per_s=summary.sampled_tokens_per_s if summary and ended else None,
            overall=statistics_of(summaries),
            environments=by_environment(summaries),
        ).model_dump(mode="json")

    def request(self, group_id: str) -> Any:
        """Return a group's request (task row, sampling, limits) as an object for JSON, or None."""
        group = self.requests().get(group_id)
        return group.model_dump(mode="json") if group else None

    @property
    def expected(self) -> int | None:
        """Number of requested samples; None if unknown."""
        return sum(group.samples for group in self.requests().values()) or None

    def requests(self) -> dict[str, GroupRequest]:
        """Return the groups of the run by id. The file is read again if it has changed."""
        if self._path is None:
            return {}
        try:
            changed = (self._path / GROUPS).stat().st_mtime_ns
            if changed != self._changed:
                self._groups = {group.id: group for group in run_groups(self._path)}
                self._changed = changed
        except (OSError, InputError):
            return {}
        return self._groups


class RunsFolder:
    """Runs of a folder. Methods may be called from several threads.

    Args:
        path: path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        return self._path.resolve().name

    def list(self) -> Any:
        """Return the runs, newest first, as an object for JSON."""
        lines = [_line(path) for path in runs_of(self._path)]
        lines.sort(key=lambda line: (line.description.started if line.description else "", line.name))
        return [line.model_dump(mode="json") for line in reversed(lines)]

    def open(self, name: str) -> tuple[Index, RunView]:
        """Open a run. The caller must close the returned index.

        Raises:
            InputError: the run does not exist.
        """
        for path in runs_of(self._path):
            if path.name == name:
                return Index(path / RESULTS), RunView(path)
        raise InputError(f"no run {name}", hint="load the page again")


def runs_of(folder: Path) -> list[Path]:
    """Return the folders of runs directly below a folder. Links, such as `latest`, are skipped."""
    try:
        return sorted(path.parent for path in folder.glob(f"*/{RESULTS}") if not path.parent.is_symlink())
    except OSError:
        return []


def is_running(path: Path) -> bool:
    """Return True if a process locks a run's folder. Takes a shared lock for some microseconds."""
    try:
        with (path / RESULTS).open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _line(path: Path) -> RunLine:
    description, summary, running = _description(path), _summary(path), is_running(path)
    results = _count_lines(path / RESULTS)
    current = summary if summary and not running and summary.overall.results == results else None
    return RunLine(
        name=path.name,
        description=description,
        running=running,
        results=results,
        expected=RunView(path).expected,
        overall=current.overall if current else None,
    )


def _description(path: Path) -> RunDescription | None:
    try:
        return read_description(path) if (path / RUN).exists() else None
    except InputError:
        return None


def _summary(path: Path) -> RunSummary | None:
    try:
        return RunSummary.model_validate_json((path / SUMMARY).read_bytes())
    except (OSError, ValidationError):
        return None


def _count_lines(path: Path) -> int:
    count = 0
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                count += block.count(b"\n")
    except OSError:
        return 0
    return count
