"""Context of one rollout: append-only token ids, and their JSON text, which grows with them.

A request to a model server carries the whole context, so its size grows with the history. The cost of
building it does not: ids that were already sent are not converted to text again.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from threading import Lock
from typing import overload

import msgspec

#: Forks may be extended in separate threads.
_growing = Lock()


class Context(Sequence[int]):
    """Token ids, append-only.

    Args:
        ids: the initial ids.
    """

    __slots__ = ("_encoded", "_end", "_ids", "_json", "_length")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = list(ids)  # shared with forks, like the JSON, until both have grown
        self._length = len(self._ids)
        self._json = bytearray()
        self._encoded = self._end = 0

    def fork(self) -> "Context":
        """Return a fork with the same ids, which then grows independently. Copies nothing until both have
        grown."""
        other = Context.__new__(Context)
        other._ids, other._length = self._ids, self._length
        other._json, other._encoded, other._end = self._json, self._encoded, self._end
        return other

    def extend(self, ids: Iterable[int]) -> None:
        """Append ids."""
        with _growing:
            if len(self._ids) != self._length:  # a fork has grown
                self._ids = self._ids[: self._length]
            self._ids.extend(ids)
            self._length = len(self._ids)

    def json(self) -> bytes:
        """Return all ids as a JSON array. Encodes only the ids added since the last call."""
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
            indices = range(self._length)[index]
            if indices.step > 0:
                return self._ids[indices.start : indices.stop : indices.step]
            return [self._ids[number] for number in indices]
        return self._ids[range(self._length)[index]]


def ids_json(ids: Sequence[int]) -> bytes:
    """Return `ids` as a JSON array without white space."""
    return ids.json() if isinstance(ids, Context) else msgspec.json.encode(list(ids))
