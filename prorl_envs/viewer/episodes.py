"""Interface of the pages to stored results, of a file or of a store."""

import json
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from prorl_envs.viewer.summary import Summary

#: Longest search text, in characters.
MAX_QUERY = 1000


class Found(NamedTuple):
    """Outcome of one step of a search.

    Args:
        numbers: of the results that contain the text.
        next: number of the first result not searched yet.
    """

    numbers: list[int]
    next: int


class EpisodeSource(Protocol):
    """Stored results in the order found, numbered from 0. The source may grow while it is read.

    Methods may be called from several threads.

    Attributes:
        name: of the source, for the user.
        bad: lines that are no results, as (number of the line, problem); `bad_lines`: their number.
        read, size: amount read so far and in total, in any unit.
        generation: number of times that the results were replaced by others.
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
        """Summary of each result found so far."""
        ...

    def extend(self, max_bytes: int | None = None) -> bool:
        """Read further results.

        Args:
            max_bytes: approximate amount; None reads to the end.

        Returns:
            whether there is more.
        """
        ...

    def line(self, number: int) -> bytes:
        """Return a result as JSON.

        Raises:
            InputError: the result does not exist, or not any more.
        """
        ...

    def search(self, text: str, first: int = 0, max_bytes: int | None = None) -> Found:
        """Search for results whose JSON has this text in a string. Case-sensitive.

        Args:
            text: to search for, at least one character.
            first: number of the first result to search.
            max_bytes: approximate amount to search; None searches all results found so far.
        """
        ...

    def close(self) -> None: ...


def needles(text: str) -> list[bytes]:
    """Return a text's spellings in JSON strings: unescaped, and with non-ASCII characters escaped."""
    written = (json.dumps(text, ensure_ascii=ascii_alone)[1:-1] for ascii_alone in (False, True))
    return sorted({words.encode("utf-8", "replace") for words in written})


def holds(line: bytes, wanted: Sequence[bytes]) -> bool:
    """Return whether the JSON contains one of these needles."""
    return any(needle in line for needle in wanted)
