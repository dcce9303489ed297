"""Markdown tables of a run, for docs/performance.md."""

from collections.abc import Iterable, Iterator

from bench import catalogue
from bench.results import Claim, Row, Rows, median, p99, ratio


def figure_1(rows: Rows, claims: list[Claim], sessions: int) -> str:
    head = ("`echo TOKEN` through", "median ms", "p99 ms", "times ours", f"{sessions} sessions, commands/s")
    ours = _median(rows, catalogue.OURS.key, "seconds")
    body = [
        (
            row.entry.label,
            _ms(median(row.seconds)),
            _ms(p99(row.seconds)),
            _number(ratio(median(row.seconds), ours)),
            _number(median(row.rates)),
            row.entry.keeps,
            row.entry.isolates,
            _remark(row),
        )
        for row in rows.values()
    ]
    return _section("1. A bash action", claims, (*head, "keeps state", "isolates", "measured"), body)


def figure_2(rows: Rows, claims: list[Claim]) -> str:
    head = ("ready, up to the first answer of its bash", "median ms", "p99 ms", "times ours", "isolates")
    ours = _median(rows, catalogue.OURS.key, "ready")
    body = [
        (
            row.entry.label,
            _ms(median(row.ready)),
            _ms(p99(row.ready)),
            _number(ratio(median(row.ready), ours)),
            row.entry.isolates,
            _remark(row),
        )
        for row in rows.values()
    ]
    return _section("2. A sandbox ready", claims, (*head, "measured"), body)


def figure_3(rows: Rows, claims: list[Claim]) -> str:
    head = ("one idle", "processes", "PSS, MB", "kernel, MB", "all of the machine, MB", "measured")
    body = [
        (
            row.entry.label,
            _number(row.memory.get("processes")),
            *(_megabytes(row.memory.get(name)) for name in ("pss", "kernel", "all")),
            _remark(row),
        )
        for row in rows.values()
    ]
    text = _section("3. Memory of an idle sandbox", claims, head, body)
    return text + "".join(f"\n{line}\n" for row in rows.values() for line in _live(row))


def figure_4(rows: Rows, claims: list[Claim]) -> str:
    head = (
        "`numbers[i] + n` in",
        "median ms",
        "p99 ms",
        "times ours",
        "ready ms",
        "ready p99 ms",
        "isolates",
    )
    ours = _median(rows, catalogue.IPYTHON.key, "seconds")
    body = [
        (
            row.entry.label,
            _ms(median(row.seconds)),
            _ms(p99(row.seconds)),
            _number(ratio(median(row.seconds), ours)),
            _ms(median(row.ready)),
            _ms(p99(row.ready)),
            row.entry.isolates,
            _remark(row),
        )
        for row in rows.values()
    ]
    return _section("4. A Python cell", claims, (*head, "measured"), body)


def _section(title: str, claims: list[Claim], head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
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
            *_table(head, body),
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


def _median(rows: Rows, key: str, values: str) -> float | None:
    row = rows.get(key)
    return median(getattr(row, values)) if row else None


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
