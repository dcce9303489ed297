"""Tables that keep all their columns on a narrow terminal, where Rich shrinks columns until they vanish."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Column, Table

#: Least width of a column whose cells may be wrapped, if they are not shorter.
_WRAPPED = 16
#: Width of a terminal on which nothing is wrapped.
_UNLIMITED = 10_000


class FittedTable:
    """Table that continues below, its first column repeated, if the terminal is too narrow for all columns.

    Args:
        table: to print. A column with `no_wrap` keeps the width of its longest cell; the others are wrapped,
            but not below 16 characters.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        unlimited = options.update(width=_UNLIMITED)
        first, *others = (
            replace(column, min_width=_least(console, unlimited, column)) for column in self._table.columns
        )
        parts = [[first]]
        for column in others:
            narrow = [replace(one, max_width=one.min_width) for one in (*parts[-1], column)]
            needed = Measurement.get(console, unlimited, self._part(narrow)).maximum
            if needed > options.max_width and len(parts[-1]) > 1:
                parts.append([first])
            parts[-1].append(column)
        for columns in parts:
            yield self._part(columns, title=columns is parts[0], caption=columns is parts[-1])

    def _part(self, columns: Sequence[Column], *, title: bool = False, caption: bool = False) -> Table:
        whole = self._table
        part = Table(
            *(column.copy() for column in columns),
            title=whole.title if title else None,
            title_justify=whole.title_justify,
            caption=whole.caption if caption else None,
            box=whole.box,
            pad_edge=whole.pad_edge,
            padding=whole.padding,
        )
        cells = zip(*(column.cells for column in columns), strict=True)
        for row, texts in zip(whole.rows, cells, strict=True):
            part.add_row(*texts, style=row.style)
        return part


def _least(console: Console, options: ConsoleOptions, column: Column) -> int:
    """Return the least width of a column that can be read, in characters."""
    width = max(Measurement.get(console, options, cell).maximum for cell in (column.header, *column.cells))
    return width if column.no_wrap else min(width, _WRAPPED)
