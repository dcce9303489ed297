"""Table of the checks of a driver or a model server, with their outcomes."""

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

_STYLES = {
    "kept": "green",
    "broken": "bold red",
    "not tried": "bold red",
    "absent": "yellow",
    "not applicable": "dim",
}


def check_table(heading: str, checks: Iterable[tuple[str, str, str, str, float]]) -> Table:
    """Return a table with one row per check.

    Args:
        heading: heading of the second column.
        checks: id, text, state, reason (or "") and seconds of each check.
    """
    table = Table(show_edge=False)
    for name in ("id", heading, ""):
        table.add_column(name, overflow="fold")
    table.add_column("s", justify="right")
    for name, text, state, reason, seconds in checks:
        outcome = Text(state, style=_STYLES[state])
        if reason:
            outcome.append(f": {reason}", style="default")
        table.add_row(name, text, outcome, f"{seconds:.2f}")
    return table
