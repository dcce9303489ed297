"""Protocol of loggers. Implement it to report the metrics of runs to a system of your own.

A package offers its logger under the entry-point group `prorl_envs.loggers`; `run --log NAME:KEY=VALUE` then
creates it with the options `{"KEY": "VALUE"}`:

    [project.entry-points."prorl_envs.loggers"]
    lab = "my_package.lab:LabLogger"
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prorl_envs.runs.statistics import RunSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """Run whose metrics are logged.

    Args:
        name: of the run: its start time.
        environment: as named on the command line.
        model: name of the model; "" if unknown.
        started: ISO 8601, UTC.
        version: of prorl-envs.
        folder: of the run; a logger may keep files in a folder of its own name below it.
        samples: number of samples requested.
        sampling, limits: of the run's first group.
    """

    name: str
    environment: str
    model: str
    started: str
    version: str
    folder: Path
    samples: int
    sampling: Mapping[str, Any]
    limits: Mapping[str, Any]


class RunLogger(Protocol):
    """Logger of the metrics of one run.

    Its methods are called one after the other, in a thread of its own, so that a slow logger does not delay
    the run. After an exception no method is called again: the run continues, and its user sees one warning.
    """

    def start(self, run: LoggedRun) -> None:
        """Start the report of a run. Called once, before the other methods."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Report metrics.

        Args:
            metrics: values by name, such as `mean_reward` or `environments/bash/pass_at/4`.
            step: number of results so far. It does not decrease; several calls may have the same.
        """
        ...

    def finish(self, summary: RunSummary | None) -> None:
        """Finish the report; its last metrics were logged before.

        Args:
            summary: the content of `summary.json`; None if the run was interrupted.
        """
        ...


#: Creates a logger from the options of `--log`. Raises InputError for a wrong option.
type LoggerFactory = Callable[[Mapping[str, str]], RunLogger]
