"""What the pages need of stored results, wherever they are kept."""

import json
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from prorl_envs.viewer.summary import Summary

#: Longest text to search for, in characters.
MAX_QUERY = 1000


class Found(NamedTuple):
    """What a step of a search came to.

    Args:
        numbers: of the results that have the text.
        next: number of the first that was not looked at.
    """

    numbers: list[int]
    next: int


class Episodes(Protocol):
    """Stored results in the order in which they were found, numbered from 0. More may come while they are
    looked at.

    Methods may be called from several threads.

    Attributes:
        name: what they are called.
        bad: lines that are no results, as (number of the line, what is wrong); `bad_lines`: how many.
        read, size: how far it was read, in any unit.
        generation: how often others took their place.
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
        """Of each result that was found so far."""
        ...

    def extend(self, max_bytes: int | None = None) -> bool:
        """Read on.

        Args:
            max_bytes: roughly how far; None reads to the end.

        Returns:
            whether there is more.
        """
        ...

    def line(self, number: int) -> bytes:
        """A result as JSON.

        Raises:
            InputError: there is no such result, or no longer.
        """
        ...

    def search(self, text: str, first: int = 0, max_bytes: int | None = None) -> Found:
        """The results whose JSON has this text in a string. Case counts.

        Args:
            text: what to look for, at least one character.
            first: number of the result to begin with.
            max_bytes: roughly how much is looked at; None looks at all that was found so far.
        """
        ...

    def close(self) -> None: ...


def needles(text: str) -> list[bytes]:
    """A text as JSON writes it within a string: as it is, and with everything escaped that can be."""
    written = (json.dumps(text, ensure_ascii=ascii_alone)[1:-1] for ascii_alone in (False, True))
    return sorted({words.encode("utf-8", "replace") for words in written})


def holds(line: bytes, wanted: Sequence[bytes]) -> bool:
    """Whether JSON has one of these needles."""
    return any(needle in line for needle in wanted)
