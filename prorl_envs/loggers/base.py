"""Protocol of loggers. Implement it to report the metrics of runs to your own system.

A package offers a logger under the entry-point group `prorl_envs.loggers`, as below. The option
`run --log NAME:KEY=VALUE` then creates it with the options `{"KEY": "VALUE"}`.

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
        name: name of the run, which is its start time.
        environment: environment as named on the command line.
        model: name of the model; "" if unknown.
        started: time of the start in ISO 8601, UTC.
        version: version of prorl-envs.
        folder: folder of the run. A logger may store files in a subfolder with its own name.
        samples: number of requested samples.
        sampling, limits: settings of the run's first group.
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

    Its methods are called one after the other in a separate thread, so that a slow logger does not delay the
    run. After an exception no further method is called. The run continues, and the user sees one warning.
    """

    def start(self, run: LoggedRun) -> None:
        """Start the report of a run. Called once, before the other methods."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Report metrics.

        Args:
            metrics: values by name, such as `mean_reward` or `environments/bash/pass_at/4`.
            step: number of results so far. It never decreases, and several calls may have the same step.
        """
        ...

    def finish(self, summary: RunSummary | None) -> None:
        """Finish the report, after the last metrics were logged.

        Args:
            summary: the content of `summary.json`; None if the run was interrupted.
        """
        ...


#: Function that creates a logger from the options of `--log`. It raises InputError for an invalid option.
type LoggerFactory = Callable[[Mapping[str, str]], RunLogger]
