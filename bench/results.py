"""Results of a run, and comparison with the targets."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench import catalogue
from bench.catalogue import Entry


@dataclass(slots=True)
class Row:
    """One subject in one figure.

    Args:
        version: version that the subject reports.
        seconds: seconds of each action, in the order of measurement.
        ready: seconds of each new session, from the request to the first correct answer.
        rates: actions per second of many concurrent sessions, one value per round.
        wrong: number of answers that differ from the expected output.
        answers: number of all answers.
        memory: bytes, and numbers of sessions, by name.
        failed: reason why measurements are missing.
        left: names of leaked processes.
    """

    entry: Entry
    version: str = ""
    seconds: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    wrong: int = 0
    answers: int = 0
    memory: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    left: list[str] = field(default_factory=list)


type Rows = Mapping[str, Row]
type Measure = Callable[[float | None], float | None]


@dataclass(frozen=True, slots=True)
class Claim:
    """One target.

    Args:
        text: description.
        asked: the bound.
        at_most: whether `asked` is an upper bound; otherwise it is a lower bound.
        unit: unit of `asked` and `measured`; empty for a ratio.
        measured: the measured value, or None if there is none.
        reason: reason why there is no measured value.
    """

    text: str
    asked: float
    at_most: bool
    unit: str = ""
    measured: float | None = None
    reason: str = ""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured <= self.asked if self.at_most else self.measured >= self.asked


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def p99(values: list[float]) -> float | None:
    if len(values) < 2:
        return median(values)
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def bash_claims(rows: Rows, sessions: int) -> list[Claim]:
    """Return the targets of figure 1."""
    ours = median_of(rows, catalogue.OURS, "seconds")
    claims = [
        _claim(rows, catalogue.PTY, "action, times the raw pty", 8, True, lambda floor: ratio(ours, floor))
    ]
    for entry, times in (
        (catalogue.SWE_REX, 250),
        (catalogue.SWE_REX_HTTP, 250),
        (catalogue.INSTANCE, 300),
        (catalogue.OH_OLD, 2000),
    ):
        text = f"times faster than {entry.label}"
        claims.append(_claim(rows, entry, text, times, False, lambda theirs: ratio(theirs, ours)))
    rate = median_of(rows, catalogue.OURS, "rates")
    claims.append(
        Claim(f"{sessions} sandboxes at once", 8000, False, "commands/s", rate, _why(rows, catalogue.OURS))
    )
    return claims


def ready_claims(rows: Rows) -> list[Claim]:
    """Return the targets of figure 2."""
    ours, pool, sif = (
        median_of(rows, entry, "ready") for entry in (catalogue.OURS, catalogue.POOL, catalogue.SIF)
    )
    bare, container = median_of(rows, catalogue.BWRAP, "ready"), median_of(rows, catalogue.EXEC, "ready")
    return [
        Claim(
            "sandbox ready, times bare bubblewrap",
            3,
            True,
            "",
            ratio(ours, bare),
            _why(rows, catalogue.OURS, catalogue.BWRAP),
        ),
        Claim("from the warm pool", 2, True, "ms", _ms(pool), _why(rows, catalogue.POOL)),
        Claim(
            "a SIF's sandbox, times one `apptainer exec`",
            0.5,
            True,
            "",
            ratio(sif, container),
            _why(rows, catalogue.SIF, catalogue.EXEC),
        ),
    ]


def memory_claims(rows: Rows, live: int) -> list[Claim]:
    """Return the targets of figure 3."""
    claims = []
    for entry, limit, text in (
        (catalogue.OURS, 3, "idle sandbox, PSS"),
        (catalogue.IPYTHON, 10, "idle sandbox with IPython, PSS"),
    ):
        row = rows.get(entry.key)
        pss = row.memory.get("pss") if row else None
        measured = None if pss is None else pss / 1e6
        why = _why(rows, entry) if row is None or row.failed else "only root may read it"
        claims.append(Claim(text, limit, True, "MB", measured, why))
    row = rows.get(catalogue.OURS.key)
    measured = row.memory.get("live") if row else None
    claims.append(Claim("idle sandboxes live at once", live, False, "", measured, _why(rows, catalogue.OURS)))
    return claims


def cell_claims(rows: Rows) -> list[Claim]:
    """Return the targets of figure 4, compared with the faster of ipykernel's two transports."""
    ours = median_of(rows, catalogue.IPYTHON, "seconds")
    kernels = [median_of(rows, entry, "seconds") for entry in (catalogue.KERNEL, catalogue.KERNEL_IPC)]
    best = min((seconds for seconds in kernels if seconds is not None), default=None)
    why = _why(rows, catalogue.IPYTHON, catalogue.KERNEL)
    ready = _ms(median_of(rows, catalogue.IPYTHON, "ready"))
    return [
        Claim("cell, times faster than ipykernel", 10, False, "", ratio(best, ours), why),
        Claim("sandbox with IPython ready", 100, True, "ms", ready, _why(rows, catalogue.IPYTHON)),
    ]


def _claim(rows: Rows, entry: Entry, text: str, asked: float, at_most: bool, measure: Measure) -> Claim:
    measured = measure(median_of(rows, entry, "seconds"))
    return Claim(text, asked, at_most, "", measured, _why(rows, catalogue.OURS, entry))


def median_of(rows: Rows, entry: Entry, values: str) -> float | None:
    """Return the median of `seconds`, `ready` or `rates` of an entry; None without values."""
    return median(getattr(rows[entry.key], values)) if entry.key in rows else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _why(rows: Rows, *entries: Entry) -> str:
    for entry in entries:
        row = rows.get(entry.key)
        if row is None:
            return f"{entry.label}: not run"
        if row.failed:
            return f"{entry.label}: {row.failed}"
    return "not measured"
