"""Interfaces of the pages to the run that results belong to, and to a folder of runs."""

from collections.abc import Sequence
from typing import Any, Protocol

from prorl_envs.viewer.episodes import EpisodeSource
from prorl_envs.viewer.summary import Summary


class RunInfo(Protocol):
    """Run that results belong to. Methods may be called from several threads."""

    def overview(self, summaries: Sequence[Summary]) -> Any:
        """Return statistics of these results and the description of the run, as an object for JSON."""
        ...

    def request(self, group_id: str) -> Any:
        """Return a group's request (task row, sampling, limits) as an object for JSON; None if unknown."""
        ...


class Runs(Protocol):
    """Runs of a folder. Methods may be called from several threads.

    Attributes:
        name: of the folder.
    """

    @property
    def name(self) -> str: ...

    def list(self) -> Any:
        """Return the runs, newest first, as an object for JSON."""
        ...

    def open(self, name: str) -> tuple[EpisodeSource, RunInfo]:
        """Open a run. The caller closes its results.

        Raises:
            InputError: there is no such run, or it cannot be read.
        """
        ...
