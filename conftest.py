"""Hooks for all tests: which ones `make test` leaves out, signals, hanging teardowns, reports of reruns."""

import faulthandler
import functools
import os
import signal
from collections.abc import Generator

import pytest

#: Optional programs, by the names of fixtures that provide one and of parameters that need one.
OPTIONAL = frozenset({
    "apptainer", "apptainer-instance", "sif",
    "busybox", "rootfs",
    "chromium",
})  # fmt: skip

#: Tests that are skipped on a machine without user namespaces: most of them start sandboxes.
SANDBOXED = (
    "envs/",
    *(f"tests/{name}/" for name in ["attacks", "bench", "cli", "conformance", "docs", "env", "gym"]),
    *(f"tests/{name}/" for name in ["learn", "nemo", "remote", "rollout", "sandbox", "tools", "trainers"]),
    "tests/test_agents.py",
    "tests/images/test_hostile_registries.py::test_a_full_disk",
)

#: Tests of promises and attacks: one that fails once has failed, so they never run again.
NEVER_RERUN = ("tests/conformance/", "tests/attacks/")

STDERR = pytest.StashKey[int]()

#: Signals that `nohup` and a shell's `&` make programs ignore, which their children inherit.
INHERITED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


def pytest_configure(config: pytest.Config) -> None:
    """Give the programs that tests start the default signal dispositions, as in a terminal.

    An ignored signal stays ignored in a started program; one with a handler is reset. The process that only
    distributes tests to workers starts no other programs, and keeps ignoring SIGHUP.
    """
    config.stash[STDERR] = os.dup(2)  # before a test's output is captured
    if getattr(config.option, "numprocesses", None):
        return
    for number in INHERITED:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Bound teardowns by `faulthandler_timeout`, which pytest drops at the first exception of a test."""
    if limit_s := float(item.config.getini("faulthandler_timeout")):
        faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[STDERR])
    yield


@functools.cache
def without_sandboxes() -> str:
    """Return why this machine cannot run the tests that start sandboxes; "" if it can."""
    from prorl_envs.sandbox.drivers.probe import find_bwrap, isolation_check

    check = isolation_check(find_bwrap())
    return "" if check.ok else f"this machine starts no sandboxes ({check.found})"


def pytest_report_header() -> str:
    reason = without_sandboxes()
    return f"{reason}: their tests are skipped, `prorl-envs doctor` has the remedy" if reason else ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need an optional program as thorough, before `-m` selects, and those that run once."""
    for item in items:
        if item.nodeid.startswith(NEVER_RERUN):
            item.add_marker(pytest.mark.flaky(reruns=0))
        if without_sandboxes() and item.nodeid.startswith(SANDBOXED):
            item.add_marker(pytest.mark.skip(reason=without_sandboxes()))
        needs = set(getattr(item, "fixturenames", ()))
        if (call := getattr(item, "callspec", None)) is not None:
            needs |= {value for value in call.params.values() if isinstance(value, str)}
        if needs & OPTIONAL:
            item.add_marker("thorough")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why each repeated test failed before: pytest itself only names it."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_sep("_", f"ran again: {report.nodeid} ({report.when})")
        terminalreporter.write_line(report.longreprtext)
