"""Rows of a stored trajectory, and the type of token decoders."""

from collections.abc import Callable, Sequence
from typing import Any

from prorl_envs.errors import InputError

type Texts = Callable[[Sequence[int]], list[str]]
"""Decoder that returns the text of each token id."""


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
