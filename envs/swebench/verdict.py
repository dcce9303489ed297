"""Evaluation of a test log, from the parser's result to the verdict. Pure.

The rules are those of the `swebench` package, version 5, with its quirks, because the lists of expected tests
were made with them. `ScriptRun.strict` is a run with corrected statuses.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Status(StrEnum):
    """Status of one test."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    ERROR = "ERROR"
    SKIPPED = "SKIPPED"
    XFAIL = "XFAIL"


type Statuses = dict[str, Status]

#: Characters of a log's end that are kept as evidence.
_TAIL_CHARS = 4000
_PASSING = (Status.PASSED, Status.XFAIL)
#: Statuses of a test that failed.
FAILING = (Status.FAILED, Status.ERROR)


class Outcomes:
    """Lookup of expected tests in the statuses of a log."""

    def __init__(self, statuses: Mapping[str, Status]) -> None:
        self._statuses = statuses
        self._sorted: Sequence[tuple[str, int]] | None = None

    def status_of(self, test: str) -> Status | None:
        """Return the status of an expected test; None if the log has none.

        Hundreds of expected names are cut off within a parameter (`test_a[log(photon`). Such a name matches
        all tests that start with it. It has a status if all of them pass, or all of them fail.
        """
        if test in self._statuses:
            return self._statuses[test]
        if test.count("[") <= test.count("]"):
            return None
        found = {position: self._statuses[name] for name, position in self._starting_with(test)}
        # If they agree, return the status of the test that is first in the log.
        return found[min(found)] if len({status in _PASSING for status in found.values()}) == 1 else None

    def _starting_with(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield the tests whose names start with `prefix`, each with its position in the log."""
        if self._sorted is None:
            self._sorted = sorted((name, position) for position, name in enumerate(self._statuses))
        for index in range(bisect_left(self._sorted, (prefix, 0)), len(self._sorted)):
            if not self._sorted[index][0].startswith(prefix):
                return
            yield self._sorted[index]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Statuses of the expected tests, and whether they resolve the issue.

    Args:
        fail_to_pass, pass_to_pass: status of each test in the log; None if the log has none.
        fail_only: whether a test counts as passed unless it failed, for logs that name only failures.
    """

    fail_to_pass: Mapping[str, Status | None]
    pass_to_pass: Mapping[str, Status | None]
    fail_only: bool = False

    def _passed(self, status: Status | None) -> bool:
        return status is not Status.FAILED if self.fail_only else status in _PASSING

    @property
    def fixed(self) -> int:
        """Number of FAIL_TO_PASS tests that pass. A skipped test does not count."""
        return sum(map(self._passed, self.fail_to_pass.values()))

    @property
    def still_passing(self) -> int:
        """Number of PASS_TO_PASS tests that still pass. A skipped test is not a regression."""
        return sum(self._passed(status) or status is Status.SKIPPED for status in self.pass_to_pass.values())

    @property
    def resolved(self) -> bool:
        return self.fixed == len(self.fail_to_pass) and self.still_passing == len(self.pass_to_pass)

    @property
    def shares(self) -> Mapping[str, float]:
        """Share of the tests of each list that have the required status; 1 for an empty list."""
        return {
            "fail_to_pass": self.fixed / len(self.fail_to_pass) if self.fail_to_pass else 1.0,
            "pass_to_pass": self.still_passing / len(self.pass_to_pass) if self.pass_to_pass else 1.0,
        }


def judge(
    fail_to_pass: Iterable[str],
    pass_to_pass: Iterable[str],
    statuses: Mapping[str, Status],
    *,
    fail_only: bool = False,
) -> Verdict:
    """Compare the expected tests with the log."""
    outcomes = Outcomes(statuses)
    return Verdict(
        {test: outcomes.status_of(test) for test in fail_to_pass},
        {test: outcomes.status_of(test) for test in pass_to_pass},
        fail_only,
    )


def judge_map(expected: Mapping[str, Status], statuses: Mapping[str, Status]) -> Verdict:
    """Apply R2E-Gym's rule: every test must have the same status as with the reference, also if it fails.

    The verdict reports a test with the expected status as passed, and a test with another status, or one that
    is not expected, as failed.
    """
    tests = sorted(expected.keys() | statuses.keys())
    as_expected = {
        test: Status.PASSED if expected.get(test) == statuses.get(test) else Status.FAILED for test in tests
    }
    return Verdict(as_expected, {})


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """One run of the test script.

    Args:
        statuses: status by test, from the log, as in the official verdict.
        exit_code: exit status of the test command; None if the script did not finish.
        log: the log, or the reason why there is none.
        failed: tests that the log reports as failed, but that have another status in `statuses`.
        condition: line of the log about a failed condition (a requirement besides the tests);
            "" if there is none.
    """

    statuses: Mapping[str, Status]
    exit_code: int | None
    log: str
    failed: frozenset[str] = frozenset()
    condition: str = ""

    @property
    def strict(self) -> "ScriptRun":
        """The same run, with the status FAILED for each test of `failed`."""
        return replace(
            self, statuses={**self.statuses, **dict.fromkeys(self.failed, Status.FAILED)}, failed=frozenset()
        )

    @property
    def tail(self) -> str:
        """The end of the log."""
        return self.log[-_TAIL_CHARS:]

    @property
    def problem(self) -> str:
        """Reason why the log gives no verdict; "" if it gives one."""
        if self.exit_code is None:
            return "the test command did not finish"
        if not self.statuses:
            return "the log names no test"
        if self.failed_without_test:
            why = f": {self.condition}" if self.condition else ""
            return f"the test command ended with status {self.exit_code}, but no test of the log failed{why}"
        return ""

    @property
    def failed_without_test(self) -> bool:
        """Whether the test command failed although the log names tests, and none of them failed."""
        failing = any(status in FAILING for status in self.statuses.values())
        return bool(self.exit_code) and bool(self.statuses) and not failing


def common_condition(run: ScriptRun, reference: ScriptRun) -> str:
    """Return the condition that fails both a submission's run and the reference's; "" if there is none.

    A condition is a requirement besides the tests, such as a minimum coverage, that fails the test command.
    """
    if not (run.failed_without_test and reference.failed_without_test):
        return ""
    # If the submission's log lacks the reference's condition, its exit status had another reason.
    if run.exit_code != reference.exit_code or (reference.condition and not run.condition):
        return ""
    return run.condition or f"status {run.exit_code} without a failed test, as with the reference patch"
