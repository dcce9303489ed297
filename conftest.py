"""Hooks for all tests: which ones `make test` leaves out, signals, and the report of repeated tests."""

import signal

import pytest

#: Optional programs, by the names of fixtures that provide one and of parameters that need one.
OPTIONAL = frozenset({
    "apptainer", "apptainer-instance", "sif",
    "busybox", "rootfs",
    "chromium",
    "postgres", "postgres_url",
})  # fmt: skip

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need an optional program as thorough, before `-m` selects."""
    for item in items:
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
