"""Read-only access to the results of a store, while a service may be writing to it."""

import bisect
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.summary import Found, Summary, holds, needles, summary_of_body
from prorl_envs.rollout.store.sqlite import open_to_read
from prorl_envs.rollout.store.tables import RESULT, bodies, unpack


class StoredEpisodes:
    """Results of a store in the order of their cursors. Implements `viewer.episodes.EpisodeSource`.

    Results that the service drops stay in the list, but cannot be opened. Writes nothing, holds no lock.

    Args:
        path: the store's file.

    Raises:
        InputError: the file cannot be read, or is not a store.

    Attributes:
        read: cursor of the last result that was read.
        size: cursor of the last result in the store.
    """

    generation = 0

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.summaries: list[Summary] = []
        self.bad: list[tuple[int, str]] = []
        self.bad_lines = self.read = self.size = 0
        self._view = open_to_read(path)
        self._cursors: list[int] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        self._view.close()

    def extend(self, max_bytes: int | None = None) -> bool:
        with self._reading():
            [newest] = self._view.execute("SELECT max(cursor) FROM results").fetchone()
            self.size, read_bytes = newest or 0, 0
            for cursor, tokens, body in bodies(self._view, self.read, self.size):
                self._take(body, cursor, tokens)
                read_bytes += len(body)
                if max_bytes is not None and read_bytes >= max_bytes:
                    break
            else:
                self.read = max(self.read, self.size)
            return self.read < self.size

    def line(self, number: int) -> bytes:
        if not 0 <= number < len(self._cursors):
            raise InputError(f"no episode {number}")
        with self._reading():
            row = self._view.execute(
                f"SELECT {RESULT} FROM results WHERE cursor = ?", (self._cursors[number],)
            ).fetchone()
        if row is None:
            raise InputError("this result is no longer kept", hint="see service.retention.max_results")
        return unpack(row).model_dump_json().encode()

    def search(self, text: str, first: int = 0, max_bytes: int | None = None) -> Found:
        patterns, numbers, read_bytes = needles(text), [], 0
        known = len(self._cursors)
        if first >= known:
            return Found([], first)
        with self._reading():
            for cursor, _, body in bodies(self._view, self._cursors[first] - 1, known - first):
                number = bisect.bisect_left(self._cursors, cursor)
                if number >= known:
                    break
                read_bytes += len(body)
                if holds(body, patterns):
                    numbers.append(number)
                if max_bytes is not None and read_bytes >= max_bytes:
                    return Found(numbers, number + 1)
        return Found(numbers, known)

    def _take(self, body: bytes, cursor: int, tokens: int) -> None:
        self.read = cursor
        try:
            summary = summary_of_body(body, cursor, tokens)
        except InputError as error:
            self.bad_lines += 1
            self.bad.append((cursor, error.message))
        else:
            self.summaries.append(summary)
            self._cursors.append(cursor)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise InputError(f"{self.name} cannot be read: {str(error).strip()}") from error
