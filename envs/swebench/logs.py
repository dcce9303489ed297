"""From a test log to the status of each test, and from those to a verdict. Pure.

The parsers answer to the names that the dataset's rows use and agree with those of the `swebench` package,
version 5, quirks included: the lists of expected tests were made with them.

A log is hostile: the tested code writes it. All here takes time in proportion to its length.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from io import StringIO


class Status(StrEnum):
    """What became of one test."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    ERROR = "ERROR"
    SKIPPED = "SKIPPED"
    XFAIL = "XFAIL"


type Statuses = dict[str, Status]
type Parser = Callable[[str], Statuses]

_WORDS = tuple(Status)
_PASSING = (Status.PASSED, Status.XFAIL)
_FAILING = (Status.FAILED, Status.ERROR)


#: Characters of a line that are read; no test's name is near it.
_MAX_LINE = 64 * 1024


def _lines(log: str) -> Iterator[str]:
    """One at a time: a list of them would take many times the log's own memory."""
    return (line.removesuffix("\n")[:_MAX_LINE] for line in StringIO(log, newline="\n"))


def _summary_words(line: str) -> list[str] | None:
    """The words of a `STATUS test ...` line of pytest's short summary; None for every other line."""
    if not line.startswith(_WORDS):
        return None
    words = line.split()
    if len(words) < 2 or words[0] not in _WORDS:
        return None
    # `SKIPPED [2] file:line: reason` counts tests and names none. The like of it for other statuses is kept:
    # some expected lists hold `[100%]`, from a wrapped progress line.
    if words[0] == Status.SKIPPED and re.fullmatch(r"\[\d+\]", words[1]):
        return None
    return words


def parse_pytest(log: str) -> Statuses:
    """pytest's short summary (`-rA`)."""
    statuses: Statuses = {}
    for line in _lines(log):
        if words := _summary_words(line):
            statuses[words[1]] = Status(words[0])
    return statuses


def parse_pytest_options(log: str) -> Statuses:
    """As `parse_pytest`, with a path as a test's parameter cut to its last part: it differs by machine."""
    return {_short_option(test): status for test, status in parse_pytest(log).items()}


def _short_option(test: str) -> str:
    # Up to the last bracket. Not by a regular expression, which would take cubic time on brackets alone.
    start, end = test.find("["), test.rfind("]")
    if not 0 <= start < end:
        return test
    name, option = test[:start], test[start + 1 : end]
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.rpartition("/")[2]
    return f"{name}[{option}]"


_CONTROL = dict.fromkeys(range(1, 32))


def parse_pytest_v2(log: str) -> Statuses:
    """pytest's short summary with colours, names that hold spaces, and the older `test STATUS` lines."""
    statuses: Statuses = {}
    for coloured in _lines(log):
        line = re.sub(r"\[(\d+)m", "", coloured).translate(_CONTROL)
        if line.startswith(_WORDS):
            if words := _summary_words(line.split(" - ", 1)[0] if line.startswith("FAILED") else line):
                statuses[" ".join(words[1:])] = Status(words[0])
        elif line.endswith(_WORDS):
            words = line.split()
            if len(words) > 1 and words[-1] in _WORDS:
                statuses[" ".join(words[:-1])] = Status(words[-1])
    return statuses


#: By the names in the rows.
PARSERS: Mapping[str, Parser] = {
    **dict.fromkeys(
        (
            *("parse_log_pytest", "parse_log_astroid", "parse_log_flask", "parse_log_marshmallow"),
            *("parse_log_pvlib", "parse_log_pyvista", "parse_log_sqlfluff", "parse_log_xarray"),
        ),
        parse_pytest,
    ),
    **dict.fromkeys(
        ("parse_log_pytest_options", "parse_log_requests", "parse_log_pydicom", "parse_log_pylint"),
        parse_pytest_options,
    ),
    **dict.fromkeys(
        ("parse_log_pytest_v2", "parse_log_astropy", "parse_log_scikit", "parse_log_sphinx"), parse_pytest_v2
    ),
}


class Outcomes:
    """What a log says, to be asked for each expected test."""

    def __init__(self, statuses: Mapping[str, Status]) -> None:
        self._statuses = statuses
        self._sorted: Sequence[tuple[str, int]] | None = None

    def status_of(self, test: str) -> Status | None:
        """The status of an expected test; None where the log has none.

        Hundreds of expected names are cut off within a parameter (`test_a[log(photon`). Such a name stands
        for the tests that begin with it, where these agree on pass or fail.
        """
        if test in self._statuses:
            return self._statuses[test]
        if test.count("[") <= test.count("]"):
            return None
        found = {place: self._statuses[name] for name, place in self._beginning_with(test)}
        # Of those that agree, the first in the log.
        return found[min(found)] if len({status in _PASSING for status in found.values()}) == 1 else None

    def _beginning_with(self, prefix: str) -> Iterator[tuple[str, int]]:
        """The tests whose names begin so, each with its place in the log."""
        if self._sorted is None:
            self._sorted = sorted((name, place) for place, name in enumerate(self._statuses))
        for index in range(bisect_left(self._sorted, (prefix, 0)), len(self._sorted)):
            if not self._sorted[index][0].startswith(prefix):
                return
            yield self._sorted[index]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The statuses of the expected tests, and whether they resolve the issue."""

    fail_to_pass: Mapping[str, Status | None]
    pass_to_pass: Mapping[str, Status | None]

    @property
    def fixed(self) -> int:
        """How many of the tests that must come to pass do. A skipped one does not."""
        return sum(status in _PASSING for status in self.fail_to_pass.values())

    @property
    def kept(self) -> int:
        """How many of the tests that must go on passing do. A skipped one is no regression."""
        return sum(status in (*_PASSING, Status.SKIPPED) for status in self.pass_to_pass.values())

    @property
    def resolved(self) -> bool:
        return self.fixed == len(self.fail_to_pass) and self.kept == len(self.pass_to_pass)


def judge(
    fail_to_pass: Iterable[str], pass_to_pass: Iterable[str], statuses: Mapping[str, Status]
) -> Verdict:
    """Compare what was expected with what the log says."""
    outcomes = Outcomes(statuses)
    return Verdict(
        {test: outcomes.status_of(test) for test in fail_to_pass},
        {test: outcomes.status_of(test) for test in pass_to_pass},
    )


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """One run of the script.

    Args:
        statuses: what the log says, by test.
        exit_code: of the test command; None where the script did not reach its end.
        tail: the end of the log.
    """

    statuses: Mapping[str, Status]
    exit_code: int | None
    tail: str

    @property
    def problem(self) -> str:
        """Why the log cannot be a verdict; empty where it can."""
        if self.exit_code is None:
            return "the test command did not come to its end"
        if not self.statuses:
            return "the log names no test"
        if self.exit_code != 0 and not any(status in _FAILING for status in self.statuses.values()):
            return f"the test command ended with status {self.exit_code}, but no test of the log failed"
        return ""
