"""Markdown tables of a run, for docs/performance.md."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from bench import catalogue
from bench.catalogue import Entry
from bench.results import Claim, Row, Rows, median, median_of, p99, ratio

type Columns = Mapping[str, Callable[[Row], str]]
"""Cells of a row, by the heading of their column."""


def figure_1(rows: Rows, claims: list[Claim], sessions: int) -> str:
    columns: Columns = {
        "`echo TOKEN` through": lambda row: row.entry.label,
        **_times(rows, catalogue.OURS, "seconds"),
        f"{sessions} sessions, commands/s": lambda row: _number(median(row.rates)),
        "keeps state": lambda row: row.entry.keeps,
        "isolates": lambda row: row.entry.isolates,
    }
    return _section("1. A bash action", claims, rows, columns)


def figure_2(rows: Rows, claims: list[Claim]) -> str:
    columns: Columns = {
        "ready, up to the first answer of its bash": lambda row: row.entry.label,
        **_times(rows, catalogue.OURS, "ready"),
        "isolates": lambda row: row.entry.isolates,
    }
    return _section("2. A sandbox ready", claims, rows, columns)


def figure_3(rows: Rows, claims: list[Claim]) -> str:
    columns: Columns = {
        "one idle": lambda row: row.entry.label,
        "processes": lambda row: _number(row.memory.get("processes")),
        "PSS, MB": lambda row: _megabytes(row.memory.get("pss")),
        "kernel, MB": lambda row: _megabytes(row.memory.get("kernel")),
        "all of the machine, MB": lambda row: _megabytes(row.memory.get("all")),
    }
    text = _section("3. Memory of an idle sandbox", claims, rows, columns)
    return text + "".join(f"\n{line}\n" for row in rows.values() for line in _live(row))


def figure_4(rows: Rows, claims: list[Claim]) -> str:
    columns: Columns = {
        "`numbers[i] + n` in": lambda row: row.entry.label,
        **_times(rows, catalogue.IPYTHON, "seconds"),
        "ready ms": lambda row: _ms(median(row.ready)),
        "ready p99 ms": lambda row: _ms(p99(row.ready)),
        "isolates": lambda row: row.entry.isolates,
    }
    return _section("4. A Python cell", claims, rows, columns)


def _times(rows: Rows, entry: Entry, values: str) -> Columns:
    """Return the columns of a row's times, compared with those of our entry."""
    ours = median_of(rows, entry, values)
    return {
        "median ms": lambda row: _ms(median(getattr(row, values))),
        "p99 ms": lambda row: _ms(p99(getattr(row, values))),
        "times ours": lambda row: _number(ratio(median(getattr(row, values)), ours)),
    }


def _section(title: str, claims: list[Claim], rows: Rows, columns: Columns) -> str:
    """Return the tables of the claims and of the rows; the last column of the rows has remarks."""
    columns = {**columns, "measured": _remark}
    asked = [
        (
            claim.text,
            f"{'at most' if claim.at_most else 'at least'} {_with_unit(claim.asked, claim.unit)}",
            claim.reason if claim.measured is None else _with_unit(claim.measured, claim.unit),
            {True: "yes", False: "**no**", None: "not measured"}[claim.met],
        )
        for claim in claims
    ]
    return "\n".join(
        [
            f"## {title}",
            "",
            *_table(("", "asked", "measured", "met?"), asked),
            "",
            *_table(columns, ([cell(row) for cell in columns.values()] for row in rows.values())),
            "",
        ]
    )


def _table(head: Iterable[str], body: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(head)
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for cells in body:
        yield f"| {' | '.join(cells)} |"


def _remark(row: Row) -> str:
    """Return the version, the number of measured times, and the problems."""
    parts = [row.version] if row.version else []
    if count := len(row.seconds) or len(row.ready):
        parts.append(f"n={count}")
    if row.memory.get("sessions"):
        parts.append(f"n={row.memory['sessions']:.0f}")
    if row.wrong:
        parts.append(f"**{row.wrong} of {row.answers} answers wrong**")
    if row.left:
        parts.append(f"left behind: {', '.join(sorted(set(row.left)))[:200]}")
    if row.failed:
        parts.append(f"failed: {row.failed}")
    return "; ".join(parts)


def _live(row: Row) -> Iterator[str]:
    memory = row.memory
    if "live" in memory:
        closed = f" All closed in {memory['live_close_s']:.0f} s;" if "live_close_s" in memory else ""
        left = "something was left (see the table)." if row.left else "nothing was left."
        yield (
            f"{memory['live']:,.0f} sandboxes live at once, each answering: started in "
            f"{memory['live_start_s']:.0f} s, {_megabytes(memory.get('live_pss'))} MB of PSS each, "
            f"{memory['live_all'] / 1e9:.2f} GB of the machine's memory in all."
            f"{closed} {left}"
        )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else _number(seconds * 1e3)


def _megabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:.2f}"


def _number(value: float | None) -> str:
    """Format with three significant digits."""
    if value is None:
        return "-"
    for limit, digits in ((1, 3), (10, 2), (100, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def _with_unit(value: float, unit: str) -> str:
    shown = f"{value:,g}" if value == int(value) else _number(value)
    return f"{shown} {unit}".strip()
