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
    """Send the rest of a stream whose reader has gone to /dev/null.

    See "Note on SIGPIPE" in Python's documentation of `signal`.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _Console(Console):
    """Console whose reader may go away. Rich would end the command with status 1, and so a run that only
    reports its progress."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(cast("TextIO", self.file))


#: For the requested data: tables, trajectories, JSON.
out = _Console(highlight=False, markup=False, emoji=False, width=_WIDTH)
#: For everything else: progress, notes, errors.
err = _Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def replace_unencodable() -> None:
    """Have the standard streams replace characters that their encoding does not have, instead of raising an
    error: text of models and of sandboxes may hold any character, lone surrogates included."""
    for stream in (sys.stdout, sys.stderr):
        # Other error handlers never raise, or were chosen with PYTHONIOENCODING.
        if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def report(error: ProrlError) -> None:
    """Print an error and its hint, if it has one."""
    err.print(Text.assemble(("error: ", "bold red"), plain(error.message)))
    if error.hint:
        err.print(Text.assemble(("hint: ", "bold cyan"), plain(error.hint)))


def print_left_out(tasks: Iterable[tuple[str, str]]) -> None:
    """Print how many tasks cannot run here, for each reason.

    Args:
        tasks: the id and the reason of each.
    """
    by_reason: dict[str, list[str]] = {}
    for task_id, reason in tasks:
        by_reason.setdefault(reason, []).append(task_id)
    for reason, ids in by_reason.items():
        few = ", ".join(ids[:3])
        named = few if len(ids) <= 3 else f"{few} and {len(ids) - 3} more"
        err.print(plain(f"left out: {named}: {reason}"), style="yellow")


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print a value as one JSON document on standard output.

    Args:
        value: pydantic models, dataclasses, mappings, sequences, paths, enumerations.
        indent: spaces per level; None prints one line.
    """
    from pydantic_core import to_json

    text = to_json(value, indent=indent, inf_nan_mode="null").decode()
    if not _is_utf8(out.encoding):
        # Strings of JSON have escapes, so no character is lost. Outside strings, all is ASCII.
        text = _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)
    # `out.print` would take several times as long for many lines.
    out.file.write(f"{text}\n")


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name == "utf-8"


def print_json_lines(values: Iterable[object]) -> None:
    """Print values as JSON Lines on standard output."""
    for value in values:
        print_json(value, indent=None)


def program() -> str:
    """Return this program as its user can type it: its name if the shell finds it, else its path."""
    found = shutil.which("prorl-envs")
    same = found is not None and os.path.realpath(found) == os.path.realpath(sys.argv[0])
    return "prorl-envs" if same else sys.argv[0]


def plain(text: str) -> Text:
    """Make hostile text safe for a terminal: no markup, no escape sequences, no other control characters."""
    return Text(printable(text))
