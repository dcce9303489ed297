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


def trials_table(what: str, trials: Iterable[tuple[str, str, str, str, float]]) -> Table:
    """Return a table with one row per check.

    Args:
        what: heading of the second column.
        trials: of each check the id, text, state, reason or "", and seconds.
    """
    shown = Table(show_edge=False)
    for name in ("id", what, ""):
        shown.add_column(name, overflow="fold")
    shown.add_column("s", justify="right")
    for name, text, state, reason, seconds in trials:
        outcome = Text(state, style=_STYLES[state])
        if reason:
            outcome.append(f": {reason}", style="default")
        shown.add_row(name, text, outcome, f"{seconds:.2f}")
    return shown
