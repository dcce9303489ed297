"""Folders of runs. By default they are named by time, and `runs/latest` is a link to the latest."""

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from prorl_envs import __version__
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.rollout.client.result_files import RESULTS, ready
from prorl_envs.runs.folder import RunDescription, RunFolder, check_new

#: Name of a run, as a strftime format.
RUN_NAME = "%Y%m%d-%H%M%S"
_RUNS, _LATEST = Path("runs"), "latest"


def create_folder(
    path: Path | None, started: datetime, environment: str, model: str, groups: Sequence[GroupRequest]
) -> RunFolder:
    """Create the folder of a new run. The caller closes it.

    Args:
        path: path of the folder; None means a new folder named by time and environment.
        started: time of the start, which gives the run its name.
        environment, model: names for the run's description.
        groups: groups of the run.

    Raises:
        InputError: the folder has results, or cannot be written.
    """
    name = started.strftime(RUN_NAME)
    chosen = path or _unused(f"{name}-{environment.replace('@', '-')}")
    description = RunDescription(
        name=name,
        environment=environment,
        model=model,
        started=started.isoformat(timespec="seconds"),
        version=__version__,
    )
    folder = RunFolder.create(chosen, description, groups)
    if path is None:
        _link_latest(chosen)
    return folder


def check_folder(path: Path | None) -> None:
    """Check that `create_folder` can create a run at a path, before other work is done.

    Raises:
        InputError: the folder has results, or cannot be written.
    """
    if path is None:
        ready(_RUNS / RESULTS)
    else:
        check_new(path)


def latest_folder() -> Path:
    """Return the folder of the latest run whose folder was named by time."""
    return (_RUNS / _LATEST).resolve()


def _unused(name: str) -> Path:
    """Return the path of a new folder; a second run in the same second gets a number."""
    path, number = _RUNS / name, 1
    while path.exists():
        number += 1
        path = _RUNS / f"{name}-{number}"
    return path


def _link_latest(path: Path) -> None:
    """Make `runs/latest` a link to the folder, unless it exists and is not a link."""
    link, fresh = _RUNS / _LATEST, _RUNS / f".{_LATEST}-{os.getpid()}"
    if link.exists() and not link.is_symlink():
        return
    with suppress(OSError):  # the link is optional: some file systems have no links
        fresh.symlink_to(path.name)
        fresh.replace(link)
