"""Interface of the pages to stored results."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.summary import Found, Summary

type Texts = Callable[[Sequence[int]], list[str]]
"""Decoder that returns the text of each token id."""


class EpisodeSource(Protocol):
    """Stored results in the order in which they are read, numbered from 0. The source may grow meanwhile.

    Methods may be called from several threads.

    Attributes:
        name: name of the source, for the user.
        bad: the first invalid lines, as (line number, problem).
        bad_lines: number of all invalid lines.
        read: amount read so far, in the unit of `size`.
        size: total amount, in any unit.
        generation: number of times that other results have replaced all results.
    """

    bad_lines: int
    read: int
    size: int
    generation: int

    @property
    def name(self) -> str: ...

    @property
    def bad(self) -> Sequence[tuple[int, str]]: ...

    @property
    def summaries(self) -> Sequence[Summary]:
        """Summaries of the results read so far."""
        ...

    def extend(self, max_bytes: int | None = None) -> bool:
        """Read further results.

        Args:
            max_bytes: approximate amount; None reads to the end.

        Returns:
            Whether further results can be read.
        """
        ...

    def line(self, number: int) -> bytes:
        """Return a result as JSON.

        Raises:
            InputError: the result does not exist, or has been removed.
        """
        ...

    def search(self, text: str, first: int = 0, max_bytes: int | None = None) -> Found:
        """Search for results with a JSON string that contains a text. The search is case-sensitive.

        Args:
            text: at least one character.
            first: number of the first result to search.
            max_bytes: approximate amount to search; None searches all results read so far.
        """
        ...

    def close(self) -> None: ...


def rows_of(result: Any) -> list[dict[str, Any]]:
    """Return the rows of a result's trajectory, forks first.

    Args:
        result: the parsed JSON of the result.

    Raises:
        InputError: the token ids of a row are not a list of integers.
    """
    forks, last = result.get("forks") or [], result.get("trajectory")
    rows = [*forks, *([last] if last else [])]
    if not all(isinstance(row["ids"], list) and set(map(type, row["ids"])) <= {int} for row in rows):
        raise InputError("the token ids of this result are not numbers")
    return rows
