"""The rows of a stored trajectory, and what reads their tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from prorl_envs.errors import InputError

type Texts = Callable[[Sequence[int]], list[str]]
"""The text of each of these tokens."""


def rows_of(result: Any) -> list[dict[str, Any]]:
    """The rows of a result's trajectory, forks first.

    Args:
        result: as its JSON says.

    Raises:
        InputError: they are not as they should be.
    """
    forks, last = result.get("forks") or [], result.get("trajectory")
    rows = [*forks, *([last] if last else [])]
    if not all(isinstance(row["ids"], list) and set(map(type, row["ids"])) <= {int} for row in rows):
        raise InputError("the token ids of this result are no numbers")
    return rows
