"""Standard streams of a Python session whose cells replace, close or redirect them.

Imports nothing of this package and uses no syntax newer than Python 3.6: a Jupyter kernel, which runs in an
image's own interpreter, executes the source of this module (`client/jupyter_setup.py`).
"""

import contextlib
import fcntl
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any

_NO_INPUT = "input() is not available: there is no one to answer (set sys.stdin to give it lines)"
_ELSEWHERE = (
    "[sys.stdout was replaced: its output is not shown; `sys.stdout = sys.__stdout__` shows it again]\n"
)


#: Lowest number of the copies of the standard descriptors.
_FIRST_COPY = 10


def copy_descriptors() -> "dict[int, int]":
    """Return copies of the standard descriptors by number."""
    return {fd: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_COPY) for fd in (0, 1, 2)}


class CellStreams(object):  # noqa: UP004 - for old interpreters
    """Streams of a session, kept apart from those that its cells can break.

    Args:
        make: makes a stream for the cells: "stdin", "stdout" or "stderr".
        own: streams for values and tracebacks by name, out of the cells' reach.
        copies: copies of the standard descriptors by number.
        shown: descriptors whose output is shown.
    """

    def __init__(
        self,
        make: "Callable[[str], Any]",
        own: "dict[str, Any]",
        copies: "dict[int, int]",
        *,
        shown: "tuple[int, ...]",
    ) -> None:
        self._make, self._own, self._copies, self._shown = make, own, copies, shown
        self._given = {}  # type: dict[str, Any]
        self._noted = None  # type: Any

    @contextlib.contextmanager
    def shown(self) -> "Iterator[None]":
        """Let `sys.stdout` and `sys.stderr` be the session's own during the block."""
        replaced = [(name, getattr(sys, name, None)) for name in self._own]
        for name, stream in replaced:
            _is_writable(stream)  # flushes it, to keep the order
            setattr(sys, name, self._own[name])
        try:
            yield
        finally:
            for name, stream in replaced:
                _is_writable(getattr(sys, name, None))
                setattr(sys, name, stream)

    def settle(self) -> None:
        """Replace streams that cannot be used any more. Call it before the first cell and after each."""
        hook = getattr(sys, "unraisablehook", None)  # type: Any  # new in Python 3.8
        sys.unraisablehook = lambda *_: None  # a stream that cannot be closed has nothing else to say
        try:
            self._settle()
        finally:
            sys.unraisablehook = hook

    def _settle(self) -> None:
        for fd, copy in self._copies.items():
            _restore(fd, copy)
        for name, usable in (("stdin", _is_open), ("stdout", _is_writable), ("stderr", _is_writable)):
            if not usable(self._given.get(name)):
                self._given[name] = self._make(name)
            setattr(sys, "__" + name + "__", self._given[name])
            if not usable(getattr(sys, name, None)):
                setattr(sys, name, self._given[name])
        # A cell may collect output for later cells, so these streams stay; but the reader must know it.
        if sys.stdout is not self._noted and _leads_elsewhere(sys.stdout, self._shown):
            self._own["stdout"].write(_ELSEWHERE)
            self._own["stdout"].flush()
        self._noted = sys.stdout

    def ask(self, prompt: object = "", *_: object, **__: object) -> str:
        """Read a line of `sys.stdin` like `input`, if a cell has set it.

        Raises:
            RuntimeError: the input is the session's own, which is empty.
            EOFError: there is no line left.
        """
        if getattr(sys, "stdin", None) in (None, self._given.get("stdin")) and _is_null(0):
            raise RuntimeError(_NO_INPUT)
        sys.stdout.write(str(prompt))
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError("EOF when reading a line")
        return line[:-1] if line.endswith("\n") else line


def _is_writable(stream: "Any") -> bool:
    """Return True if a stream can be written and flushed; flush it."""
    try:
        stream.write("")
        stream.flush()
        return not getattr(stream, "closed", False)
    except BaseException:  # noqa: BLE001 - a stream of a cell can raise anything
        return False


def _is_open(stream: "Any") -> bool:
    try:
        return stream is not None and not getattr(stream, "closed", False)
    except BaseException:  # noqa: BLE001
        return False


def _leads_elsewhere(stream: "Any", shown: "tuple[int, ...]") -> bool:
    """Return True if a stream writes to memory or a file. Objects of other types may write to a shown one."""
    if isinstance(stream, io.StringIO):
        return True
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() not in shown
    except (OSError, ValueError):  # it has no descriptor
        return True


def _restore(fd: int, copy: int) -> None:
    """Restore a standard descriptor that a cell closed or redirected, except redirected input."""
    try:
        kept = os.fstat(fd) and (fd == 0 or os.path.sameopenfile(fd, copy))
    except OSError:
        kept = False
    if not kept:
        with contextlib.suppress(OSError):  # the cell has closed the copy too
            os.dup2(copy, fd)


def _is_null(fd: int) -> bool:
    try:
        return stat.S_ISCHR(os.fstat(fd).st_mode)
    except OSError:
        return True
