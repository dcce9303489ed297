"""Interfaces of the pages to the run of the shown results, and to a folder of runs."""

from collections.abc import Sequence
from typing import Any, Protocol

from prorl_envs.viewer.episodes import EpisodeSource
from prorl_envs.viewer.summary import Summary


class RunInfo(Protocol):
    """Run of the shown results. Methods may be called from several threads."""

    def overview(self, summaries: Sequence[Summary]) -> Any:
        """Return the statistics of the results and the description of the run, as an object for JSON."""
        ...

    def request(self, group_id: str) -> Any:
        """Return a group's request (task row, sampling, limits) as an object for JSON, or None."""
        ...


class Runs(Protocol):
    """Runs of a folder. Methods may be called from several threads.

    Attributes:
        name: name of the folder.
    """

    @property
    def name(self) -> str: ...

    def list(self) -> Any:
        """Return the runs, newest first, as an object for JSON."""
        ...

    def open(self, name: str) -> tuple[EpisodeSource, RunInfo]:
        """Open a run. The caller must close the returned source.

        Raises:
            InputError: the run does not exist, or cannot be read.
        """
        ...
