"""Consoles for standard output and standard error, and the format of errors."""

import codecs
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from io import TextIOWrapper
from typing import TextIO, cast

from rich.console import Console
from rich.text import Text

from prorl_envs.errors import ProrlError, printable

#: Columns if the output is a file or a pipe, which has no width.
_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120

_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


def discard(stream: TextIO) -> None:
    """Redirect a stream whose reader is gone to /dev/null.

    See "Note on SIGPIPE" in Python's documentation of `signal`.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class _Console(Console):
    """Console that ignores a closed pipe. Rich would exit with status 1, which would stop a run only because
    its progress cannot be printed."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(cast("TextIO", self.file))


#: For the requested data: tables, trajectories, JSON.
out = _Console(highlight=False, markup=False, emoji=False, width=_WIDTH)
#: For everything else: progress, notes, errors.
err = _Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def replace_unencodable() -> None:
    """Make the standard streams replace characters that their encoding lacks, instead of raising an error.

    Texts of models and of sandboxes may contain any character, including lone surrogates.
    """
    for stream in (sys.stdout, sys.stderr):
        # Other error handlers never raise, or were chosen with PYTHONIOENCODING.
        if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def report(error: ProrlError) -> None:
    """Print an error and its hint, if it has one."""
    err.print(Text.assemble(("error: ", "bold red"), plain(error.message)))
    if error.hint:
        err.print(Text.assemble(("hint: ", "bold cyan"), plain(error.hint)))


def print_by_reason(
    state: str, tasks: Iterable[tuple[str, str]], *, style: str, console: Console = err
) -> None:
    """Print tasks, each reason once.

    Args:
        state: state of the tasks, such as `left out`.
        tasks: id and reason of each task. Reasons that differ only in the id, or after their first line (the
            output of a build, for example), are the same; the first is printed, shortened.
        style: colour.
        console: where to print.
    """
    by_reason: dict[str, list[tuple[str, str]]] = {}
    for task_id, reason in tasks:
        same = reason.strip().partition("\n")[0].replace(task_id, "")
        by_reason.setdefault(same, []).append((task_id, reason))
    for found in by_reason.values():
        listed = ", ".join(task_id for task_id, _ in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        text = plain(f"{state}: {listed}{more}: {_shortened(found[0][1])}")
        console.print(text, style=style, soft_wrap=True)


def _shortened(text: str) -> str:
    """Return the first line and the last two lines, without the output of a build between them."""
    first, *others = text.strip().splitlines() or [""]
    return "\n".join([first, *(["..."] if len(others) > 2 else []), *others[-2:]])


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print a value as one JSON document on standard output.

    Args:
        value: pydantic models, dataclasses, mappings, sequences, paths, enumerations.
        indent: spaces per level; None prints one line.
    """
    from pydantic_core import to_json

    text = to_json(value, indent=indent, inf_nan_mode="null").decode()
    if codecs.lookup(out.encoding).name != "utf-8":
        # JSON strings can have escapes, so no character is lost. Outside of strings, JSON is ASCII.
        text = _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)
    # For many lines, `out.print` would take several times as long.
    out.file.write(f"{text}\n")


def print_json_lines(values: Iterable[object]) -> None:
    """Print values as JSON Lines on standard output."""
    for value in values:
        print_json(value, indent=None)


def program() -> str:
    """Return the command that starts this program: its name if it is in PATH, else its path."""
    found = shutil.which("prorl-envs")
    same = found is not None and os.path.realpath(found) == os.path.realpath(sys.argv[0])
    return "prorl-envs" if same else sys.argv[0]


def plain(text: str) -> Text:
    """Return hostile text in a form that is safe for a terminal: without markup and control characters."""
    return Text(printable(text))
