"""Logger of metrics to MLflow."""

import dataclasses
import logging
import re
import time
from collections.abc import Mapping

from prorl_envs.errors import InputError
from prorl_envs.extras import install_extras
from prorl_envs.loggers.base import LoggedRun
from prorl_envs.loggers.registry import checked
from prorl_envs.runs.statistics import RunSummary

try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param
except ImportError as error:
    raise InputError("MLflow is not installed", hint=install_extras("mlflow")) from error

_EXPERIMENT = "prorl-envs"
_OPTIONS = frozenset({"tracking_uri", "experiment", "name"})
#: Characters that MLflow refuses in the names of metrics.
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
#: Maximum number of metrics that MLflow accepts in one request.
_MAX_METRICS = 1000


class MlflowLogger:
    """`RunLogger` for MLflow.

    Args:
        options: `tracking_uri` (default: MLflow's default, which is `MLFLOW_TRACKING_URI` or a file in the
            current folder), `experiment`, and `name` of the run.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = checked("mlflow", options, _OPTIONS)
        self._run_id = ""

    def start(self, run: LoggedRun) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # MLflow must not write to the terminal
        self._client = MlflowClient(tracking_uri=self._options.get("tracking_uri"))
        name = self._options.get("experiment", _EXPERIMENT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        created = self._client.create_run(experiment, run_name=self._options.get("name", run.name))
        self._run_id = created.info.run_id
        params = [Param(key, str(value)) for key, value in dataclasses.asdict(run).items()]
        self._client.log_batch(self._run_id, params=params)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = time.time_ns() // 1_000_000
        values = [Metric(_NOT_IN_NAMES.sub("_", name), value, now, step) for name, value in metrics.items()]
        for first in range(0, len(values), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=values[first : first + _MAX_METRICS])

    def finish(self, summary: RunSummary | None) -> None:
        self._client.set_terminated(self._run_id, status="FINISHED" if summary is not None else "KILLED")
