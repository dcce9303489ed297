"""The context of one rollout: token ids that only grow at their end, and their JSON, which grows with them.

A request to a model server carries the whole context, so its bytes grow with the history. What is spent on
making them does not: the ids that were sent before are not turned into text again.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import msgspec


class Context(Sequence[int]):
    """Token ids, append-only.

    Args:
        ids: the beginning.
    """

    __slots__ = ("_encoded", "_ids", "_json")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = list(ids)
        self._json = bytearray()
        self._encoded = 0

    def extend(self, ids: Iterable[int]) -> None:
        """Append."""
        self._ids.extend(ids)

    def json(self) -> bytes:
        """All ids as a JSON array. What was encoded before is not encoded again."""
        if self._encoded < len(self._ids):
            new = msgspec.json.encode(self._ids[self._encoded :])
            self._json += (b"," if self._json else b"") + new[1:-1]
            self._encoded = len(self._ids)
        return b"".join((b"[", self._json, b"]"))

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._ids[index]


def ids_json(ids: Sequence[int]) -> bytes:
    """`ids` as a JSON array without white space."""
    return ids.json() if isinstance(ids, Context) else msgspec.json.encode(list(ids))
