"""Index of a JSONL file of results: summary and position of each line. It never loads the whole file."""

import os
import threading
from pathlib import Path

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.summary import Found, Summary, holds, needles, summary_of
from prorl_envs.strict_json import json_object

#: Longest line that is accepted as a result, in bytes.
MAX_LINE = 512 << 20
#: Largest number of invalid lines that are reported with their problems; further lines are only counted.
MAX_NAMED = 100
_BLOCK = 1 << 20


class Index:
    """`EpisodeSource` for a JSONL file. The file may grow or be replaced meanwhile.

    Args:
        path: path of the file.

    Attributes:
        read: number of bytes read so far.
        size: size of the file at the last check, in bytes.

    Raises:
        InputError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._lock = threading.Lock()
        self._open()

    @property
    def name(self) -> str:
        """Name of the file; for the results of a run, the name of its folder."""
        return self.path.resolve().parent.name if self.path.name == "results.jsonl" else self.path.name

    def close(self) -> None:
        self._file.close()

    def extend(self, max_bytes: int | None = None) -> bool:
        with self._lock:
            if self._replaced():
                self._file.close()
                self._open()
                self.generation += 1
            self.size = os.fstat(self._file.fileno()).st_size
            until = self.size if max_bytes is None else min(self.size, self.read + max_bytes)
            while self.read < until and self._take_line():
                pass
            return self.read < self.size and not self._unfinished

    def line(self, number: int) -> bytes:
        with self._lock:
            if not 0 <= number < len(self._positions):
                raise InputError(f"no episode {number}")
            offset, length = self._positions[number]
            line = os.pread(self._file.fileno(), length, offset)
        if len(line) < length:
            raise InputError("the file has become shorter", hint="load the page again")
        return line

    def search(self, text: str, first: int = 0, max_bytes: int | None = None) -> Found:
        spellings, numbers, number = needles(text), [], first
        searched_bytes = 0
        while number < len(self._positions) and (max_bytes is None or searched_bytes < max_bytes):
            line = self.line(number)
            searched_bytes += len(line)
            if holds(line, spellings):
                numbers.append(number)
            number += 1
        return Found(numbers, number)

    def _open(self) -> None:
        try:
            self._file = self.path.open("rb", buffering=_BLOCK)
        except OSError as error:
            raise InputError(
                f"cannot read {self.path}: {error.strerror}", hint="name a results.jsonl"
            ) from error
        self.summaries: list[Summary] = []
        self._positions: list[tuple[int, int]] = []  # offset and length of each result, in bytes
        self.bad: list[tuple[int, str]] = []
        self.bad_lines = self.read = self._lines = 0
        self._unfinished = False
        self.size = os.fstat(self._file.fileno()).st_size

    def _replaced(self) -> bool:
        """Return whether the file was replaced or became shorter. A removed file stays open."""
        opened = os.fstat(self._file.fileno())
        try:
            found = self.path.stat()
        except OSError:
            return False
        return (opened.st_dev, opened.st_ino) != (found.st_dev, found.st_ino) or found.st_size < self.read

    def _take_line(self) -> bool:
        """Read the next line; return False if it is not complete yet."""
        line = self._file.readline(MAX_LINE)
        self._unfinished = not line.endswith(b"\n") and len(line) < MAX_LINE and json_object(line) is None
        if self._unfinished:
            self._file.seek(self.read)
            return False
        offset, self.read = self.read, self.read + len(line)
        self._lines += 1
        if not line.isspace():
            try:
                summary = summary_of(line)
            except InputError as error:
                self.bad_lines += 1
                if len(self.bad) < MAX_NAMED:
                    self.bad.append((self._lines, error.message))
            else:
                self._positions.append((offset, len(line)))
                self.summaries.append(summary)
        return True
