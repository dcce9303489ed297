"""Logger of metrics to TensorBoard's event files."""

import dataclasses
from collections.abc import Mapping

from prorl_envs.errors import InputError
from prorl_envs.extras import install_extras
from prorl_envs.loggers.base import LoggedRun
from prorl_envs.loggers.registry import checked
from prorl_envs.runs.statistics import RunSummary

try:
    from tensorboardX import SummaryWriter
except ImportError as error:
    raise InputError("tensorboardX is not installed", hint=install_extras("tensorboard")) from error

_FOLDER = "tensorboard"


class TensorboardLogger:
    """`RunLogger` for TensorBoard.

    Args:
        options: `dir`, the folder of the event files; by default `tensorboard/` in the folder of the run.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = checked("tensorboard", options, {"dir"})

    def start(self, run: LoggedRun) -> None:
        self._writer = SummaryWriter(self._options.get("dir") or str(run.folder / _FOLDER))
        lines = [f"    {name}: {value}" for name, value in dataclasses.asdict(run).items()]
        self._writer.add_text("run", "\n".join(lines))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, summary: RunSummary | None) -> None:
        self._writer.close()
