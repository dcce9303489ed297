"""The two consoles, and how an error looks."""

import os
import shutil
import sys

from rich.console import Console
from rich.text import Text

from prorl_envs.errors import ProrlError, printable

#: Columns where the output is a file or a pipe, which has no width of its own.
_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120

#: For what was asked for: tables, trajectories, JSON.
out = Console(highlight=False, markup=False, emoji=False, width=_WIDTH)
#: For everything else: progress, notes, errors.
err = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def report(error: ProrlError) -> None:
    """Show an error and, where there is one, what to do about it."""
    err.print(Text.assemble(("error: ", "bold red"), plain(error.message)))
    if error.hint:
        err.print(Text.assemble(("hint: ", "bold cyan"), plain(error.hint)))


def program() -> str:
    """This program as its user can type it: by name where the shell finds it, else by path."""
    found = shutil.which("prorl-envs")
    same = found is not None and os.path.realpath(found) == os.path.realpath(sys.argv[0])
    return "prorl-envs" if same else sys.argv[0]


def plain(text: str) -> Text:
    """Hostile text made safe for a terminal: no markup, no escape sequences, no other control characters."""
    return Text(printable(text))
