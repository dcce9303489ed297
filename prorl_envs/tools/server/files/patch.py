"""Parser of patches written by models. Pure.

There are two formats: the envelope that agents are trained on (`*** Begin Patch`), and unified diffs. Line
numbers are only hints; the unchanged and removed lines determine the place of a change.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from prorl_envs.tools.server.files.text import EditError

#: Maximum files of one patch, and maximum hunks of one file.
CHANGES_LIMIT = 1000
HUNKS_LIMIT = 1000

_BEGIN, _END = "*** Begin Patch", "*** End Patch"
_ADD, _DELETE, _UPDATE = "*** Add File:", "*** Delete File:", "*** Update File:"
_MOVE, _END_OF_FILE = "*** Move to:", "*** End of File"
_RANGES = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@")
#: Git's version, after a line `-- `, at the end of the output of `git format-patch`.
_VERSION = re.compile(r"\d+\.\d")
#: First line of a code fence, or of a here-document.
_WRAPPER = re.compile(
    r"\s*(?:(?P<fence>`{3,}|~{3,})[\w-]*|(?:apply_patch\s*)?<<-?\s*(?P<q>['\"]?)(?P<word>\w+)(?P=q))\s*"
)
_UNSUPPORTED = ("rename ", "copy ", "GIT binary patch", "Binary files ")


@dataclass(slots=True)
class Hunk:
    """Change at one place of a file.

    Args:
        anchors: lines of the file that precede the hunk, in this order.
        lines: sign and text of each line: a space (unchanged), minus (removed) or plus (added).
        at_end: True if the hunk is at the end of the file.
        hint: line, counted from 0, at which a unified diff expects the hunk.
        final_newline: whether the changed file has a final line feed; None if the hunk does not change this.
    """

    anchors: list[str] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    at_end: bool = False
    hint: int | None = None
    final_newline: bool | None = None

    @property
    def old(self) -> list[str]:
        """The lines that the file must contain."""
        return [text for sign, text in self.lines if sign != "+"]


@dataclass(frozen=True, slots=True)
class Add:
    """Section of a patch that creates a file."""

    path: str
    content: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Section of a patch that deletes a file."""

    path: str


@dataclass(frozen=True, slots=True)
class Update:
    """Section of a patch that changes a file; `move_to` is its new path, or empty."""

    path: str
    move_to: str
    hunks: list[Hunk]


type Change = Add | Delete | Update


def parse(patch: str) -> list[Change]:
    """Parse a patch of either format.

    Raises:
        EditError: the text is not a valid patch; with a message for the model.
    """
    lines = _unwrapped([line.removesuffix("\r") for line in patch.strip("\r\n").split("\n")])
    if lines[0].strip() == _BEGIN:
        changes = _envelope(lines)
    elif any(line.startswith("--- ") for line in lines):
        changes = _unified(lines)
    else:
        raise EditError(f"The patch must begin with `{_BEGIN}` (or be a unified diff).")
    if not changes:
        raise EditError("The patch changes nothing: it names no file.")
    if len(changes) > CHANGES_LIMIT:
        raise EditError(f"The patch changes more than {CHANGES_LIMIT} files.")
    return changes


def _unwrapped(lines: list[str]) -> list[str]:
    """Take a patch out of the code fence or the here-document in which some models put it."""
    while len(lines) > 2 and (start := _WRAPPER.fullmatch(lines[0])):
        if lines[-1].strip() != (start["fence"] or start["word"]):
            break
        lines = lines[1:-1]
    return lines


def _envelope(lines: list[str]) -> list[Change]:
    if lines[-1].strip() != _END:
        raise EditError(f"The patch must end with `{_END}`.")
    changes: list[Change] = []
    for number, header, body in _sections(lines):
        path = header.partition(":")[2].strip()
        if not path:
            raise EditError(f"Line {number} of the patch names no file.")
        if header.startswith(_ADD):
            changes.append(Add(path, _added(number, body)))
        elif header.startswith(_DELETE):
            if any(body):
                raise EditError(f"Line {number} of the patch deletes {path}, and nothing can follow that.")
            changes.append(Delete(path))
        else:
            changes.append(_update(number, path, body))
    return changes


def _sections(lines: list[str]) -> Iterator[tuple[int, str, list[str]]]:
    """Yield each file's header with its line number, and the lines that follow it."""
    starts = [n for n, line in enumerate(lines) if line.startswith((_ADD, _DELETE, _UPDATE))]
    if stray := [n for n in range(1, starts[0] if starts else len(lines) - 1) if lines[n].strip()]:
        raise EditError(
            f"Line {stray[0] + 1} of the patch belongs to no file: first comes `{_UPDATE} PATH`, "
            f"`{_ADD} PATH` or `{_DELETE} PATH`."
        )
    for start, end in pairwise([*starts, len(lines) - 1]):
        yield start + 1, lines[start], lines[start + 1 : end]


def _added(number: int, body: list[str]) -> str:
    while body and not body[-1]:
        body = body[:-1]
    for offset, line in enumerate(body, 1):
        if not line.startswith("+"):
            raise EditError(f"Line {number + offset} of the patch: every line of a new file begins with `+`.")
    return "".join(f"{line[1:]}\n" for line in body)


def _update(number: int, path: str, body: list[str]) -> Update:
    move_to = ""
    if body and body[0].startswith(_MOVE):
        move_to = body[0].removeprefix(_MOVE).strip()
        number, body = number + 1, body[1:]
    hunks = [Hunk()]
    for offset, line in enumerate(body, 1):
        if line.startswith("@@"):
            if hunks[-1].lines:
                hunks.append(Hunk())
            heading = _RANGES.match(line)
            anchor = "" if heading else line.removeprefix("@@").removesuffix("@@").strip()
            if anchor:
                hunks[-1].anchors.append(anchor)
        elif line.rstrip() == _END_OF_FILE:
            hunks[-1].at_end = True
        else:
            _add_line(hunks[-1], line, number + offset)
    hunks = _complete(hunks)
    if not hunks and not move_to:
        raise EditError(f"The patch names {path} and says no change of it.")
    return Update(path, move_to, hunks)


def _add_line(hunk: Hunk, line: str, number: int) -> None:
    """Add one line to a hunk. An empty line is an unchanged empty line without its leading space."""
    if line.startswith("\\"):  # \ No newline at end of file
        hunk.final_newline = bool(hunk.lines) and hunk.lines[-1][0] == "-"
    elif line[:1] in (" ", "+", "-", ""):
        hunk.lines.append((line[:1] or " ", line[1:]))
    else:
        raise EditError(
            f"Line {number} of the patch begins with {line[:1]!r}; within a hunk, a line begins with a space "
            "(stays), `-` (goes), `+` (comes) or `@@`."
        )


def _complete(hunks: list[Hunk]) -> list[Hunk]:
    for hunk in hunks:
        # Empty lines at the end are probably separators between sections of the patch, not context.
        while hunk.lines and hunk.lines[-1] == (" ", "") and not hunk.at_end:
            hunk.lines.pop()
    if len(hunks) > HUNKS_LIMIT:
        raise EditError(f"The patch has more than {HUNKS_LIMIT} hunks for one file.")
    return [hunk for hunk in hunks if any(sign != " " for sign, _ in hunk.lines)]


def _unified(lines: list[str]) -> list[Change]:
    if refused := [line for line in lines if line.startswith(_UNSUPPORTED)]:
        raise EditError(f"A patch cannot do this; use the shell: {refused[0][:80]}")
    starts = list(_headers(lines))
    if not starts:
        raise EditError("In a unified diff, `--- OLD` and `+++ NEW` come first.")
    return [_unified_file(lines[start:end], start + 1) for start, end in pairwise([*starts, len(lines)])]


def _headers(lines: list[str]) -> Iterator[int]:
    """Yield the index of the first line of each file's part.

    A removed line `-- x` before an added line `++ y` looks like a header, so the lines of a hunk are counted.
    """
    old = new = 0  # lines that are still missing according to the hunk's heading
    for n, line in enumerate(lines):
        if _is_header(lines, n) and not (old > 0 and new > 0 and _is_change(lines, n, old, new)):
            yield n
            old = new = 0
        elif ranges := _RANGES.match(line):
            old, new = int(ranges[2] or 1), int(ranges[3] or 1)
        elif line[:1] in (" ", "+", "-", ""):
            old -= line[:1] != "+"
            new -= line[:1] != "-"
        elif not line.startswith("\\"):
            old = new = 0


def _is_header(lines: list[str], n: int) -> bool:
    return lines[n].startswith("--- ") and any(line.startswith("+++ ") for line in lines[n + 1 : n + 2])


def _is_change(lines: list[str], n: int, old: int, new: int) -> bool:
    """Return true if two lines that look like a header belong to a hunk, which lacks `old` and `new` lines.
    Models miscount lines. So if a hunk's heading follows, the two lines must complete the hunk, and differ
    from the usual `--- a/PATH` and `+++ b/PATH`."""
    if not any(map(_RANGES.match, lines[n + 2 : n + 3])):
        return True
    usual = lines[n].startswith("--- a/") and lines[n + 1] == f"+++ b/{lines[n][6:]}"
    return old == new == 1 and not usual


def _unified_file(lines: list[str], number: int) -> Change:
    old, new = (line[4:].partition("\t")[0].strip() for line in lines[:2])
    hunks: list[Hunk] = []
    for offset, line in enumerate(lines[2:], 2):
        if line == "-- " and any(map(_VERSION.match, lines[offset + 1 : offset + 2])):
            break
        if ranges := _RANGES.match(line):
            start, count = int(ranges[1]), int(ranges[2] or 1)
            hunks.append(Hunk(hint=start - 1 if count else start))
        elif line.startswith("diff "):
            break
        elif hunks:
            _add_line(hunks[-1], line, number + offset)
        elif line.strip():
            raise EditError(f"Line {number + offset} of the patch: a hunk begins with `@@ -a,b +c,d @@`.")
    hunks = _complete(hunks)
    if new == "/dev/null":
        return Delete(old.removeprefix("a/"))
    if old == "/dev/null":
        content = "\n".join(text for hunk in hunks for sign, text in hunk.lines if sign == "+")
        complete = not hunks or hunks[-1].final_newline is False
        return Add(new.removeprefix("b/"), content if complete else content + "\n")
    if old.startswith("a/") and new.startswith("b/"):
        old, new = old[2:], new[2:]
    if not hunks and old == new:
        raise EditError(f"The patch names {new[:200]} and says no change of it.")
    return Update(old, new if new != old else "", hunks)
