"""Logger of metrics to Weights & Biases. Its files are in `wandb/` in the folder of the run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.extras import install_extras
from prorl_envs.loggers.base import LoggedRun
from prorl_envs.loggers.registry import checked
from prorl_envs.runs.statistics import RunSummary

try:
    import wandb
except ImportError as error:
    raise InputError("wandb is not installed", hint=install_extras("wandb")) from error

_PROJECT = "prorl-envs"
_OPTIONS = frozenset({"project", "entity", "group", "name", "mode"})
_QUIET = wandb.Settings(silent=True, console="off")


class WandbLogger:
    """`RunLogger` for W&B.

    Args:
        options: `project`, `entity`, `group`, `name` and `mode` (`online`, `offline`), see `wandb.init`. The
            environment variables `WANDB_*` apply as well.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = checked("wandb", options, _OPTIONS)
        self._run: Any = None
        # W&B must not write to the terminal, capture its output, or prompt for a key.
        mode = options.get("mode") or wandb.setup(_QUIET).settings.mode
        if mode in ("online", "shared") and not wandb.login(prompt=False):
            raise InputError("--log wandb: there is no API key", hint="wandb login, or wandb:mode=offline")

    def start(self, run: LoggedRun) -> None:
        config = {**dataclasses.asdict(run), "folder": str(run.folder)}
        chosen: dict[str, Any] = {"project": _PROJECT, "name": run.name, **self._options}
        self._run = wandb.init(dir=str(run.folder), config=config, settings=_QUIET, **chosen)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, summary: RunSummary | None) -> None:
        self._run.finish(exit_code=0 if summary is not None else 1)
