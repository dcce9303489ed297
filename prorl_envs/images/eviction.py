"""Eviction from stores, whose disk several nodes may share."""

import secrets
from collections.abc import Sequence
from pathlib import Path


def choose_unused[T](
    used: Sequence[tuple[float, int, T]],
    *,
    max_bytes: int,
    keep_after: float,
) -> list[T]:
    """Choose the entries of a store to remove, the least recently used first.

    Args:
        used: last use, bytes and key of each entry.
        max_bytes: limit of the total size of the remaining entries.
        keep_after: entries used after this time stay.
    """
    total, chosen = sum(size for _, size, _ in used), []
    for when, size, key in sorted(used, key=lambda entry: entry[:2]):
        if when <= keep_after and total > max_bytes:
            total -= size
            chosen.append(key)
    return chosen


def server_time(folder: Path) -> float:
    """Return the current time of the file server, as the time of a new file in an existing folder.

    Raises:
        OSError: the folder cannot be written.
    """
    mark = folder / f".now-{secrets.token_hex(8)}"
    mark.touch()
    try:
        return mark.stat().st_mtime
    finally:
        mark.unlink()
