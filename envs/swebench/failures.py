"""Failures in a test log that the data sets' parsers overlook: failed tests, and failed conditions. Pure.

A condition is a requirement besides the tests, such as a minimum coverage, that fails the test command.

The parsers keep one status per test: the last one that they recognise. They skip failed sub-tests of pytest
(`SUBFAILED[message] (i=1) file::test - why`, or `[message] (i=1) SUBFAIL file::test - why` from the plugin
pytest-subtests). Some skip errors in a test's teardown. A passed test hides a failed test of the same name.

A log is hostile: the tested code writes it. All functions here take time linear in the log's length.
"""

import re
from collections.abc import Collection, Iterator

from prorl_envs.envs.swebench.log_parsers import MAX_LINE, SUMMARY, lines_of, short_option

_COLOUR = re.compile(r"\x1b\[[0-9;]*m|\r")
_SUBTEST = re.compile(r"(?:^|(?<=\s))SUBFAIL(?:ED)?(?=[\s\[(])")
_PROGRESS = re.compile(r" (PASSED|XFAIL|FAILED|ERROR)(?: +\[ *\d{1,3}%\])?$")
_FAILED = ("FAILED", "ERROR")
_PASSED = ("PASSED", "XFAIL")
_UNITTEST_HEADINGS = ("FAIL: ", "ERROR: ")
_UNITTEST_ENDINGS = (" ... FAIL", " ... ERROR")
_SYMPY_ENDINGS = (" F", " E")
_SESSION = "= test session starts ="
#: Lines of pytest-cov and coverage.
_CONDITION = re.compile(r"Required test coverage of \S{1,20} not reached|Coverage failure: total of ")
_MAX_CONDITION = 300
#: Places of a line at which a test's name may start or end; more are not tried.
_MAX_CUTS = 16


def failed_tests(log: str, tests: Collection[str]) -> frozenset[str]:
    """Return the tests in `tests` that the log reports as failed, even if it also reports them as passed.

    If several sessions or summaries name a test, the last one decides: the others may be output of tests that
    run a test runner. A failed sub-test also counts if it is reported before the summary, because some
    summaries omit sub-tests and report the test as passed.

    Args:
        log: output of the test command.
        tests: names as in the parser's result.
    """
    found: set[str] = set()
    passed: set[str] = set()
    failed: set[str] = set()
    with_subtest: set[str] = set()
    in_summary = False
    for coloured in lines_of(log):
        line = _COLOUR.sub("", coloured).rstrip()
        if SUMMARY in line or _SESSION in line:
            found = (found - passed) | failed
            passed, failed = set(), set()
        if _SESSION in line:
            with_subtest = set()
        in_summary = SUMMARY in line or (in_summary and _SESSION not in line)
        named = {test for text in _failures(line) for test in _names(text) if test in tests}
        failed |= named
        if not in_summary and _SUBTEST.search(line):
            with_subtest |= named
        passed.update(test for text in _passes(line) for test in _names(text) if test in tests)
    return frozenset((found - passed) | failed | with_subtest)


def failed_condition(log: str) -> str:
    """Return the log's last line about a coverage below the required minimum, or ""."""
    condition = ""
    for line in lines_of(log):
        if _CONDITION.search(line):
            condition = _COLOUR.sub("", line).strip()[:_MAX_CONDITION]
    return condition


def _failures(line: str) -> Iterator[str]:
    """Yield the parts of a line that start with the name of a failed test."""
    word, _, rest = line.partition(" ")
    if word in _FAILED:
        yield rest
    elif subtest := _SUBTEST.search(line):
        yield from _subtest_names(line[: subtest.start()], line[subtest.end() :])
    elif line.endswith(_UNITTEST_ENDINGS):
        text = line.strip().rpartition(" ... ")[0]
        yield text
        yield _test_case(text)
    elif progress := _PROGRESS.search(line):
        if progress[1] in _FAILED:
            yield line[: progress.start()]
    elif line.startswith("test_") and line.endswith(_SYMPY_ENDINGS):
        yield line
    elif line.startswith(_UNITTEST_HEADINGS):
        yield _test_case(rest)


def _passes(line: str) -> Iterator[str]:
    """Yield the parts of a line of pytest that start with the name of a passed test."""
    word, _, rest = line.partition(" ")
    if word in _PASSED:
        yield rest
    elif (progress := _PROGRESS.search(line)) and progress[1] in _PASSED:
        yield line[: progress.start()]


def _subtest_names(before: str, after: str) -> Iterator[str]:
    """Yield the parts of a sub-test's line that start with the name of the test.

    Args:
        before: text before the status; it starts with the name in a progress line.
        after: text after the status; the name follows the message in a summary.
    """
    if "::" in before.partition(" ")[0]:
        yield before.partition(" ")[0]
        for mark in (" [", " ("):
            yield before.partition(mark)[0]
        yield before
    starts = [match.start() for match in re.finditer(r"(?<=\s)\S+", after) if "::" in match[0]]
    for start in starts[:_MAX_CUTS]:
        yield after[start:]


def _test_case(text: str) -> str:
    """Return `method (class)` from unittest's name of a test, without the parameters of a sub-test."""
    return " ".join(text.split(maxsplit=2)[:2])


def _names(text: str) -> Iterator[str]:
    """Yield the possible names of the test that `text` starts with, in the spellings of all parsers.

    A message after ` - ` may follow the name; but a name can contain ` - ` too.
    """
    end = -1
    for _ in range(_MAX_CUTS):
        end = text.find(" - ", end + 1)
        name = " ".join((text if end < 0 else text[:end])[:MAX_LINE].split())
        word = name.partition(" ")[0]
        yield from (name, word, short_option(word))
        yield ".".join(name.split("::")[1:])
        yield word.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")
        if end < 0:
            return
