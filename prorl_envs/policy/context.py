"""The context of one rollout: token ids that only grow at their end, and their JSON, which grows with them.

A request to a model server carries the whole context, so its bytes grow with the history. What is spent on
making them does not: the ids that were sent before are not turned into text again.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from threading import Lock
from typing import overload

import msgspec

#: Forks may grow in threads of their own.
_growing = Lock()


class Context(Sequence[int]):
    """Token ids, append-only.

    Args:
        ids: the beginning.
    """

    __slots__ = ("_encoded", "_end", "_ids", "_json", "_length")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = list(ids)  # forks share it, and the JSON, as long as they end where it ends
        self._length = len(self._ids)
        self._json = bytearray()
        self._encoded = self._end = 0

    def fork(self) -> "Context":
        """Another with the same ids: from here on they grow apart. Costs nothing before the second one of
        them does."""
        other = Context.__new__(Context)
        other._ids, other._length = self._ids, self._length
        other._json, other._encoded, other._end = self._json, self._encoded, self._end
        return other

    def extend(self, ids: Iterable[int]) -> None:
        """Append."""
        with _growing:
            if len(self._ids) != self._length:  # a fork has grown
                self._ids = self._ids[: self._length]
            self._ids.extend(ids)
            self._length = len(self._ids)

    def json(self) -> bytes:
        """All ids as a JSON array. What was encoded before is not encoded again."""
        if self._encoded < self._length:
            if len(self._json) != self._end:
                self._json = self._json[: self._end]
            new = msgspec.json.encode(self._ids[self._encoded : self._length])
            self._json += (b"," if self._json else b"") + new[1:-1]
            self._encoded, self._end = self._length, len(self._json)
        return b"".join((b"[", memoryview(self._json)[: self._end], b"]"))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return islice(self._ids, self._length)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            places = range(self._length)[index]
            if places.step > 0:
                return self._ids[places.start : places.stop : places.step]
            return [self._ids[place] for place in places]
        return self._ids[range(self._length)[index]]


def ids_json(ids: Sequence[int]) -> bytes:
    """`ids` as a JSON array without white space."""
    return ids.json() if isinstance(ids, Context) else msgspec.json.encode(list(ids))
