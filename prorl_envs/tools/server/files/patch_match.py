"""Matching of a patch's hunks to lines of a file, and the resulting content. Pure."""

from collections.abc import Iterator

from prorl_envs.tools.server.files.patch import Hunk
from prorl_envs.tools.server.files.text import EditError, Text

#: Maximum lines compared per file. Only files with very many repeated lines need more.
_COMPARISONS = 20_000_000
#: Maximum lines of a file that is patched.
_LINES_LIMIT = 1_000_000
_QUOTED_LINES = 3
_QUOTED_CHARACTERS = 200


def patched(text: Text, hunks: list[Hunk]) -> str:
    """Return the content of a file after a patch.

    A hunk is applied to the lines that match it, after the previous hunk: at the first match, or for a
    unified diff at the match nearest to its line number. Lines are compared exactly and, if there is no
    match, without trailing white space. Unchanged lines are kept as in the file.

    Raises:
        EditError: a hunk has no match; the message names it and shows the file's text.
    """
    if text.content.count("\n") > _LINES_LIMIT:
        raise EditError(f"the file has more than {_LINES_LIMIT} lines; use the shell.")
    return _Patching(text).apply(hunks)


class _Patching:
    def __init__(self, text: Text) -> None:
        self._text = text
        self._lines = text.content.split("\n")
        self._final_newline = self._lines[-1] == ""
        if self._final_newline:
            self._lines.pop()
        self._exact = [line.removesuffix("\r") for line in self._lines]
        self._loose = [line.rstrip() for line in self._lines]
        self._budget = _COMPARISONS

    def apply(self, hunks: list[Hunk]) -> str:
        result: list[str] = []
        done = 0
        for number, hunk in enumerate(hunks, 1):
            try:
                start = self._find(hunk, done)
            except EditError as error:
                raise EditError(f"hunk {number} of {len(hunks)} does not apply: {error}") from None
            result += self._lines[done:start]
            done = start + self._apply_hunk(hunk, start, result)
            if hunk.final_newline is not None:
                self._final_newline = hunk.final_newline
        result += self._lines[done:]
        return "\n".join(result) + ("\n" if self._final_newline and result else "")

    def _apply_hunk(self, hunk: Hunk, start: int, result: list[str]) -> int:
        """Append the result of a hunk at line `start`; return the number of the file's lines it covers."""
        end = "\r" if self._text.crlf else ""
        covered = 0
        for sign, line in hunk.lines:
            if sign == "+":
                result.append(self._text.fitted(line) + end)
                continue
            if sign == " ":
                result.append(self._lines[start + covered])
            covered += 1
        return covered

    def _find(self, hunk: Hunk, start: int) -> int:
        for anchor in hunk.anchors:
            start = self._anchor(anchor, start) + 1
        old, count = hunk.old, len(self._lines)
        if not old:
            place = hunk.hint if hunk.hint is not None else start if hunk.anchors else count
            return min(max(place, start), count)
        if hunk.at_end:
            start = max(start, count - len(old))
        for lines, wanted in ((self._exact, old), (self._loose, [line.rstrip() for line in old])):
            if places := self._matches(lines, wanted, start, first_only=hunk.hint is None):
                hint = hunk.hint or 0
                return min(places, key=lambda place: abs(place - hint))
        raise EditError(self._complaint(hunk, start))

    def _matches(self, lines: list[str], wanted: list[str], start: int, *, first_only: bool) -> list[int]:
        places: list[int] = []
        for place in self._occurrences(lines, wanted[0], start):
            self._budget -= len(wanted)
            if self._budget < 0:
                raise EditError("its lines repeat too often in the file; use the shell.")
            if lines[place : place + len(wanted)] == wanted:
                places.append(place)
                if first_only:
                    break
        return places

    def _occurrences(self, lines: list[str], line: str, start: int) -> Iterator[int]:
        while True:
            try:
                start = lines.index(line, start)
            except ValueError:
                return
            yield start
            start += 1

    def _anchor(self, anchor: str, start: int) -> int:
        for place in range(start, len(self._lines)):
            if self._lines[place].strip() == anchor:
                return place
        raise EditError(f"no line after line {start} is its `@@ {anchor[:_QUOTED_CHARACTERS]}`.")

    def _complaint(self, hunk: Hunk, start: int) -> str:
        old = [line.rstrip() for line in hunk.old]
        if hunk.at_end:
            return f"the file does not end with its lines:\n{_quoted(hunk.old)}"
        if self._matches(self._loose, old, 0, first_only=True):
            return f"its lines occur only before line {start + 1}; hunks come in the order of the file."
        matched, place = 0, -1
        for candidate in self._occurrences(self._loose, old[0], start):
            length = self._agreement(old, candidate)
            if length > matched:
                matched, place = length, candidate
        after = f" after line {start}" if start else ""
        if not matched:
            return f"its lines are not in the file{after}:\n{_quoted(hunk.old)}"
        there = self._exact[place + matched : place + matched + 1] or ["(the end of the file)"]
        return (
            f"its lines are not in the file{after}. At line {place + 1} its first {matched} agree; then the "
            f"hunk has\n{_quoted(hunk.old[matched : matched + 1])}\nwhere the file has\n{_quoted(there)}"
        )

    def _agreement(self, old: list[str], place: int) -> int:
        """Return how many lines from `place` on match the hunk. `_matches` bounds the cost of this too."""
        for length, line in enumerate(old):
            if self._loose[place + length : place + length + 1] != [line]:
                return length
        return len(old)


def _quoted(lines: list[str]) -> str:
    quoted = [line[:_QUOTED_CHARACTERS] for line in lines[:_QUOTED_LINES]]
    return "\n".join(quoted + ["..."] * (len(lines) > _QUOTED_LINES))
