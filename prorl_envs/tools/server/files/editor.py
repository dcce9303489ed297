"""File viewer and editor, with the commands and answers that agents have been trained on.

Runs in the sandbox's mount namespace with the sandbox's own rights. A file keeps its permissions and all text
outside of an edit (see `text.py`). Binary files are refused. Links are followed. A file is replaced
atomically, so other hard links to it keep the old content.
"""

import os
from collections.abc import Iterator
from itertools import islice

from prorl_envs.tools.protocol.messages import Edit
from prorl_envs.tools.server.files.text import EditError, Text, decode, load
from prorl_envs.tools.server.files.undo import BYTES_LIMIT, UndoHistory, Version
from prorl_envs.tools.server.files.whole_files import read_file, write_file

#: Maximum entries of a directory listing.
LISTING_LIMIT = 1000
#: Lines shown before and after a change.
_CONTEXT = 4


class Editor:
    """Editor of one sandbox.

    Args:
        history: stores the previous versions of changed files.
    """

    def __init__(self, history: UndoHistory) -> None:
        self._history = history

    def edit(self, request: Edit) -> str:
        """Execute one command.

        Returns:
            The text for the model, of any length.

        Raises:
            EditError: the command failed; with a message for the model.
        """
        if not request.path.startswith("/"):
            raise EditError(f"The path {request.path!r} is not absolute: it must start with `/`.")
        if "\0" in request.path:
            raise EditError("The path contains a NUL character.")
        try:
            return self._edit(request)
        except OSError as error:
            raise EditError(f"{request.path}: {(error.strerror or str(error)).lower()}.") from error

    def _edit(self, request: Edit) -> str:
        path = request.path
        match request.command:
            case "view":
                return self._view(path, request.view_range)
            case "create":
                return self._create(path, _needed(request.file_text, "file_text", "create"))
            case "str_replace":
                old = _needed(request.old_str, "old_str", "str_replace")
                return self._replace(path, old, request.new_str or "")
            case "insert":
                line = _needed(request.insert_line, "insert_line", "insert")
                return self._insert(path, line, _needed(request.new_str, "new_str", "insert"))
            case "undo_edit":
                return self._undo(path)
            case unknown:
                raise EditError(f"There is no command {unknown!r}.")

    def _view(self, path: str, view_range: list[int] | None) -> str:
        if os.path.isdir(path):  # noqa: PTH112 - this process does not import pathlib
            if view_range is not None:
                raise EditError("`view_range` is for files, and this is a directory.")
            return _listing(path)
        lines = _lines(load(path).content)
        first, last = _checked_range(view_range, len(lines))
        return f"Here's the result of running `cat -n` on {path}:\n{_numbered(lines, first, last)}"

    def _create(self, path: str, text: str) -> str:
        if os.path.lexists(path):
            raise EditError(f"A file already exists at {path}, and `create` does not overwrite.")
        data = text.encode()
        write_file(path, data, mode=None)
        self._history.push(os.path.realpath(path), None, data)
        return f"File created successfully at: {path}\n"

    def _replace(self, path: str, old: str, new: str) -> str:
        if not old:
            raise EditError("`old_str` is empty; `insert` adds text.")
        if old == new:
            raise EditError("`old_str` and `new_str` are the same, so nothing would change.")
        text = load(path)
        before, new = text.content, text.fitted(new)
        if old not in before and "\r\n" in before:
            # Models write "\n"; the file keeps its own line endings.
            old, new = _with_crlf(old), _with_crlf(new)
        lines = list(islice(_occurrences(before, old), 20))
        if not lines:
            raise EditError(f"No replacement was made: `old_str` does not occur verbatim in {path}.")
        if len(lines) > 1:
            raise EditError(
                f"No replacement was made: `old_str` occurs more than once in {path}, on lines "
                f"{', '.join(map(str, lines))}. Include more of the text around the one you mean."
            )
        return self._store(path, text, before.replace(old, new), lines[0], new.count("\n"))

    def _insert(self, path: str, line: int, added: str) -> str:
        text = load(path)
        before = text.content
        lines = [line + "\n" for line in _lines(before)]
        if lines and not before.endswith("\n"):
            lines[-1] = lines[-1].removesuffix("\n")
        if not 0 <= line <= len(lines):
            raise EditError(f"`insert_line` is {line}; it must be between 0 and {len(lines)}.")
        added = added if added.endswith("\n") else added + "\n"
        if line and not lines[line - 1].endswith("\n"):
            added = "\n" + added.removesuffix("\n")
        after = "".join([*lines[:line], text.fitted(added), *lines[line:]])
        return self._store(path, text, after, line + 1, added.strip("\n").count("\n"))

    def _store(self, path: str, text: Text, after: str, line: int, more: int) -> str:
        """Write the new content. Return the text for the model, with line `line` and the `more` changed lines
        that follow it."""
        data = text.encode(after)
        write_file(path, data, mode=None)
        self._history.push(os.path.realpath(path), Version(text.encode(text.content)), data)
        lines = _lines(after)
        snippet = _numbered(lines, max(1, line - _CONTEXT), min(len(lines), line + more + _CONTEXT))
        return (
            f"The file {path} has been edited. "
            f"Here's the result of running `cat -n` on a snippet of {path}:\n{snippet}"
            "Review the changes and make sure they are as expected. Edit the file again if necessary.\n"
        )

    def _undo(self, path: str) -> str:
        key = os.path.realpath(path)  # independent of the name used for the edit
        if not self._history.has(key):
            raise EditError(f"No edit of {path} is left to undo.")
        try:
            data = read_file(key, BYTES_LIMIT)[0]
        except FileNotFoundError:
            data = None
        if data is not None and self._history.is_newer(key, data):  # a file that is gone has nothing to lose
            raise EditError(
                f"{path} was changed after its last edit with this tool, and undoing that edit would discard "
                "the newer change. Nothing was undone."
            )
        version = self._history.pop(key)
        try:
            if version is None:
                os.unlink(key)  # noqa: PTH108
                return f"Last edit of {path} undone: the file, which it had created, is removed.\n"
            write_file(path, version.data, mode=version.mode)
        except OSError:
            self._history.push(key, version, data)
            raise
        lines = _lines(decode(version.data).content)
        return f"Last edit of {path} undone. The file is now:\n{_numbered(lines, 1, len(lines))}"


def _needed[T](value: T | None, name: str, command: str) -> T:
    if value is None:
        raise EditError(f"`{command}` needs the argument `{name}`.")
    return value


def _with_crlf(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\n", "\r\n")


def _lines(text: str) -> list[str]:
    """Return the lines without line ends. `splitlines` would also split at form feeds and others."""
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def _occurrences(text: str, part: str) -> Iterator[int]:
    """Yield the line numbers at which `part` begins. Overlaps count, because any of them could be meant."""
    position = text.find(part)
    line, counted = 1, 0
    while position >= 0:
        line += text.count("\n", counted, position)
        counted = position
        yield line
        position = text.find(part, position + 1)


def _checked_range(view_range: list[int] | None, count: int) -> tuple[int, int]:
    if view_range is None:
        return 1, count
    if len(view_range) != 2:
        raise EditError("`view_range` must hold two line numbers: the first and the last.")
    first, last = view_range
    if not 1 <= first <= max(count, 1):
        raise EditError(f"`view_range` begins at {first}; the file has lines 1 to {count}.")
    if last == -1:
        return first, count
    if last < first:
        raise EditError(f"`view_range` ends at {last}, before it begins at {first}.")
    return first, min(last, count)


def _numbered(lines: list[str], first: int, last: int) -> str:
    numbered = (f"{number:6}\t{lines[number - 1].removesuffix('\r')}\n" for number in range(first, last + 1))
    return "".join(numbered).encode("utf-8", "replace").decode()


def _listing(path: str) -> str:
    entries = list(islice(_walk(path, depth=2), LISTING_LIMIT + 1))
    lines = [
        f"Here are the files and directories up to 2 levels deep in {path}, hidden ones left out:",
        path,
        *entries[:LISTING_LIMIT],
    ]
    if len(entries) > LISTING_LIMIT:
        lines.append(f"[... more than {LISTING_LIMIT} entries; the rest is left out ...]")
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace").decode()


def _walk(path: str, depth: int) -> Iterator[str]:
    with os.scandir(path) as directory:
        # Bounded before sorting: a directory may hold millions of entries.
        visible = (entry for entry in directory if not entry.name.startswith("."))
        entries = sorted(islice(visible, LISTING_LIMIT + 1), key=lambda entry: entry.name)
    for entry in entries:
        is_directory = entry.is_dir(follow_symlinks=False)
        yield entry.path + ("/" if is_directory else "")
        if is_directory and depth > 1 and os.access(entry.path, os.R_OK | os.X_OK):
            yield from _walk(entry.path, depth - 1)
