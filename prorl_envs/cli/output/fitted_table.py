"""Tables without borders, and tables that keep all columns on a narrow terminal, where Rich drops some."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import TextType

#: Minimum width of a column whose cells may be wrapped; less if all cells are shorter.
_WRAPPED = 16
#: Width that is large enough for every table.
_UNLIMITED = 10_000


def plain_table(
    *names: str, title: TextType | None = None, numbers: Collection[str] = (), unwrapped: Collection[str] = ()
) -> Table:
    """Return an empty table without borders.

    Args:
        names: headings of the columns.
        numbers: columns that are aligned to the right; their cells are not wrapped.
        unwrapped: further columns whose cells are not wrapped.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        no_wrap = name in numbers or name in unwrapped
        table.add_column(
            name, justify="right" if name in numbers else "left", no_wrap=no_wrap, overflow="fold"
        )
    return table


class FittedTable:
    """Table that is split into several tables, one below the other, if the terminal is too narrow.

    Each part repeats the first column.

    Args:
        table: the table. A column with `no_wrap` keeps the width of its longest cell; other columns are
            wrapped, but have at least 16 characters.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        unlimited = options.update(width=_UNLIMITED)
        first, *others = (
            replace(column, min_width=_min_width(console, unlimited, column))
            for column in self._table.columns
        )
        parts = [[first]]
        for column in others:
            narrow = [replace(part, max_width=part.min_width) for part in (*parts[-1], column)]
            needed = Measurement.get(console, unlimited, self._part(narrow)).maximum
            if needed > options.max_width and len(parts[-1]) > 1:
                parts.append([first])
            parts[-1].append(column)
        for columns in parts:
            yield self._part(columns, title=columns is parts[0], caption=columns is parts[-1])

    def _part(self, columns: Sequence[Column], *, title: bool = False, caption: bool = False) -> Table:
        table = self._table
        part = Table(
            *(column.copy() for column in columns),
            title=table.title if title else None,
            title_justify=table.title_justify,
            caption=table.caption if caption else None,
            box=table.box,
            pad_edge=table.pad_edge,
            padding=table.padding,
        )
        cells = zip(*(column.cells for column in columns), strict=True)
        for row, texts in zip(table.rows, cells, strict=True):
            part.add_row(*texts, style=row.style)
        return part


def _min_width(console: Console, options: ConsoleOptions, column: Column) -> int:
    """Return the minimum width of a column, in characters."""
    width = max(Measurement.get(console, options, cell).maximum for cell in (column.header, *column.cells))
    return width if column.no_wrap else min(width, _WRAPPED)
