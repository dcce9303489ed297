"""Hooks for all tests: the skips that CI accepts, and the tests that may run twice."""

import os
import re
import signal
from collections.abc import Generator

import pytest

#: With this variable set, a skip fails the test unless its reason is expected. .ci/run sets it.
ONLY_EXPECTED_SKIPS = "ONLY_EXPECTED_SKIPS"

#: Patterns of the reasons for which CI accepts a skip. A missing program is not among them: CI installs all
#: programs that the tests need.
EXPECTED_SKIPS = (
    # another command runs them, with its own peers
    r"run by scripts/test-nemo\.sh in an environment of its own",
    r"(NEMO_RL_SOURCE|SLIME_SOURCE|PAPER_SERVER_SOURCE) names no checkout of ",
    # NeMo Gym 0.4, which CI tests
    r"this NeMo Gym has no (terminals|manifests)",
    r"0\.4 cannot lend sandboxes",
    # root or an ordinary user; CI runs both
    r"only (root|an ordinary user) ",
    r"root can add one",
    # the kernel, the file system or the architecture
    r"this machine lends no control groups of ",
    r"the hard limit of this machine is lower",
    r"(the filter has no numbers|no filter) (for|on) this (architecture|machine)",
    r"this file system has no (attributes|flags)",
    r"this interpreter counts references differently",
    # the test is for the opposite case, or another test covers it
    r"its parsers are installed",
    r"tests/test_tutorial\.py runs it, as a part of the whole",
    r"it has no reference, which is what would be tried",
)


#: Signals that `nohup` and a shell's `&` make programs ignore, which their children inherit.
INHERITED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


def pytest_configure(config: pytest.Config) -> None:
    """Give the programs that tests start the default signal dispositions, as in a terminal.

    An ignored signal stays ignored in a started program; one with a handler is reset. The process that only
    distributes tests to workers starts no other programs, and keeps ignoring SIGHUP.
    """
    if getattr(config.option, "numprocesses", None):
        return
    for number in INHERITED:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def is_expected(reason: str) -> bool:
    return any(re.match(pattern, reason) for pattern in EXPECTED_SKIPS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_unexpected_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_unexpected_skip(report)
    return report


def _refuse_unexpected_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure if its reason is not expected."""
    if not (report.skipped and os.environ.get(ONLY_EXPECTED_SKIPS)) or hasattr(report, "wasxfail"):
        return
    assert isinstance(report.longrepr, tuple)  # path, line and "Skipped: reason"
    path, line, text = report.longrepr
    reason = text.removeprefix("Skipped: ")
    if not is_expected(reason):
        report.outcome = "failed"
        report.longrepr = f"unexpected skip (conftest.py): {reason} [{path}:{line}]"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a flaky test without a reason: `@pytest.mark.flaky(reruns=1, reason="...")`."""
    for item in items:
        if (mark := item.get_closest_marker("flaky")) and not mark.kwargs.get("reason"):
            raise pytest.UsageError(f"{item.nodeid} is marked as flaky without a reason")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why each repeated test failed the first time: pytest itself only names it."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_sep("_", f"ran again: {report.nodeid} ({report.when})")
        terminalreporter.write_line(report.longreprtext)
