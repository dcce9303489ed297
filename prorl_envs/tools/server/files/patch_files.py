"""Application of a patch to the sandbox's files, completely or not at all.

All files are read and checked before the first write. Each file is replaced atomically. If a write fails, the
earlier writes are reverted.
"""

import contextlib
import os
import stat
from collections.abc import Iterator

from prorl_envs.tools.server.files.patch import Add, Change, Delete, Update, parse
from prorl_envs.tools.server.files.patch_match import patched
from prorl_envs.tools.server.files.text import FILE_LIMIT, EditError, Text, checked
from prorl_envs.tools.server.files.undo import UndoHistory, Version
from prorl_envs.tools.server.files.whole_files import read_file, write_file

#: Maximum bytes of all files of one patch, old and new versions together.
BYTES_LIMIT = 64 * 1024 * 1024
_NEW_MODE = 0o644
_UNCHANGED = "\nNo file was changed."


def apply_patch(patch: str, workdir: str, history: UndoHistory) -> str:
    """Apply a patch.

    Args:
        patch: the model's text.
        workdir: absolute directory for relative paths.
        history: receives the previous versions of the files, so that each change can be undone.

    Returns:
        The text for the model.

    Raises:
        EditError: the patch does not apply, and no file has changed; with a message for the model.
    """
    plan = _Plan(workdir)
    for change in parse(patch):
        plan.add(change)
    plan.write()
    for path, before, after in plan.changes():
        history.push(path, before, after.data if after is not None else None)
    return "Success. Updated the following files:\n" + "".join(f"{line}\n" for line in plan.summary)


class _Plan:
    """Planned versions of the files. Later changes of a patch see the results of earlier ones."""

    def __init__(self, workdir: str) -> None:
        self._workdir = workdir
        self.summary: list[str] = []
        # By real path, so that two names of one file share an entry.
        self._names: dict[str, str] = {}
        self._before: dict[str, Version | None] = {}
        self._after: dict[str, Version | None] = {}
        self._bytes = 0

    def add(self, change: Change) -> None:
        """Add one change to the plan.

        Raises:
            EditError: the change cannot be made.
        """
        try:
            self._add(change)
        except OSError as error:
            raise EditError(
                f"{change.path}: {(error.strerror or str(error)).lower()}.{_UNCHANGED}"
            ) from error
        except EditError as error:
            raise EditError(f"{change.path}: {error}{_UNCHANGED}") from None

    def write(self) -> None:
        """Write all files, or none.

        Raises:
            EditError: the operating system refused a write.
        """
        done: list[str] = []
        folders: list[str] = []
        # Deletions come last, so that a moved file is never missing; concurrent readers may see it twice.
        for path in sorted(self._after, key=lambda path: self._after[path] is None):
            folders += _missing_folders(path)
            try:
                _store(path, self._after[path])
            except OSError as error:
                changed = [self._names[path] for path in reversed(done) if not self._revert(path)]
                for folder in reversed(folders):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)  # noqa: PTH106
                effect = f"\nThese stay changed: {', '.join(changed)}." if changed else _UNCHANGED
                name, reason = self._names[path], (error.strerror or str(error)).lower()
                raise EditError(f"{name}: {reason}.{effect}") from error
            done.append(path)

    def changes(self) -> Iterator[tuple[str, Version | None, Version | None]]:
        """Yield each changed file's real path, previous version and new version."""
        for path, after in self._after.items():
            yield path, self._before[path], after

    def _add(self, change: Change) -> None:
        path = self._enter(change.path)
        match change:
            case Add():
                self._must_be_new(path)
                self._set(path, change.content.encode(), _NEW_MODE)
                self.summary.append(f"A {change.path}")
            case Delete():
                self._remove(path)
                self.summary.append(f"D {change.path}")
            case Update():
                text, mode = self._text(path)
                data = text.encode(patched(text, change.hunks))
                if change.move_to:
                    target = self._enter(change.move_to)
                    self._must_be_new(target)
                    self._remove(path)
                    path = target
                self._set(path, data, mode)
                self.summary.append(f"M {change.move_to or change.path}")

    def _enter(self, name: str) -> str:
        """Return the real path of a file that the patch names; remember its current version."""
        if "\0" in name or ".." in name.split("/"):
            raise EditError(f"the path {name[:200]!r} holds `..` or a NUL character.")
        path = os.path.join(self._workdir, name)  # noqa: PTH118
        real = os.path.realpath(path)
        if real not in self._before:
            self._names[real] = path
            self._before[real] = _version(real)
            self._count(self._before[real])
        return real

    def _must_be_new(self, path: str) -> None:
        if self._current(path) is not None:
            raise EditError("there is a file already, and the patch would overwrite it.")

    def _current(self, path: str) -> Version | None:
        return self._after.get(path, self._before[path])

    def _text(self, path: str) -> tuple[Text, int]:
        version = self._current(path)
        if version is None:
            removed = path in self._after
            raise EditError("the patch has removed it already." if removed else "no such file.")
        return checked(version.data, self._names[path]), _NEW_MODE if version.mode is None else version.mode

    def _set(self, path: str, data: bytes, mode: int) -> None:
        version = Version(data, mode)
        self._count(version)
        self._after[path] = version

    def _remove(self, path: str) -> None:
        if self._current(path) is None:
            raise EditError("no such file.")
        if os.path.islink(self._names[path]):  # noqa: PTH114
            raise EditError("it is a link; use the shell to remove or move it.")
        self._after[path] = None

    def _count(self, version: Version | None) -> None:
        self._bytes += len(version.data) if version is not None else 0
        if self._bytes > BYTES_LIMIT:
            raise EditError(f"the files of one patch may have {BYTES_LIMIT} bytes.")

    def _revert(self, path: str) -> bool:
        try:
            _store(path, self._before[path])
        except OSError:
            return False
        return True


def _version(path: str) -> Version | None:
    """Return the current version of the file at a path; None if there is no file."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)  # noqa: PTH116
    except FileNotFoundError:
        return None
    data, size = read_file(path, FILE_LIMIT)
    if size > FILE_LIMIT:
        raise EditError(f"it has {size} bytes, and a patch takes {FILE_LIMIT}; use the shell.")
    return Version(data, mode)


def _store(path: str, version: Version | None) -> None:
    if version is None:
        os.unlink(path)  # noqa: PTH108
    else:
        write_file(path, version.data, mode=version.mode)


def _missing_folders(path: str) -> list[str]:
    """Return the directories that writing a file would create, outermost first."""
    missing: list[str] = []
    folder = os.path.dirname(path)  # noqa: PTH120
    while not os.path.lexists(folder):
        missing.insert(0, folder)
        folder = os.path.dirname(folder)  # noqa: PTH120
    return missing
