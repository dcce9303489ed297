"""Hooks of the root's conftest.py and settings of pytest: reruns, optional programs, hangs, signals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def only_our_hooks(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    (pytester.path / "conftest.py").symlink_to(ROOT / "conftest.py")
    pytester.makeini("[pytest]\nmarkers = thorough: left out of make test")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


def run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_one=f"import pytest\n{source}\n")
    return pytester.runpytest_inprocess("-ra", "-p", "no:cacheprovider", "-p", "no:xdist", *options)


FLAKY = """
tries = []

def test_sometimes():
    tries.append(1)
    assert len(tries) == 2, "the first try"
"""


def test_the_failure_of_a_repeated_test_is_shown(pytester: pytest.Pytester) -> None:
    report = run(pytester, FLAKY, "--reruns", "2").stdout.str()
    assert "1 passed, 1 rerun" in report
    assert "ran again: test_one.py::test_sometimes" in report and "the first try" in report


@pytest.mark.parametrize("folder", ["attacks", "conformance/sabotage"])
def test_promises_and_attacks_are_not_repeated(pytester: pytest.Pytester, folder: str) -> None:
    path = pytester.path / "tests" / folder
    path.mkdir(parents=True)
    (path / "test_two.py").write_text(FLAKY)
    run(pytester, "", "--reruns", "2").assert_outcomes(failed=1)


NEEDS = """
@pytest.fixture
def chromium(): pass

def test_page(chromium): pass

@pytest.mark.parametrize("driver", ["bubblewrap", "apptainer"])
def test_driver(driver): pass
"""


def test_tests_of_optional_programs_are_left_out_of_make_test(pytester: pytest.Pytester) -> None:
    done = run(pytester, NEEDS, "-m", "not thorough", "-v")
    done.assert_outcomes(passed=1, deselected=2)
    done.stdout.fnmatch_lines(["*test_driver[[]bubblewrap[]] PASSED*"])


HANGING = """
import threading

@pytest.fixture
def service():
    yield
    threading.Event().wait()

def test_passes(service): pass

def test_fails(service): assert False
"""


@pytest.mark.parametrize("name", ["test_passes", "test_fails"])
def test_a_hanging_teardown_is_ended_with_a_traceback(pytester: pytest.Pytester, name: str) -> None:
    pytester.makepyfile(test_one=f"import pytest\n{HANGING}")
    limits = ["-o", "faulthandler_timeout=1", "-o", "faulthandler_exit_on_timeout=true"]
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-k", name, *limits, timeout=60)
    assert done.ret == 1
    done.stderr.fnmatch_lines(["*Timeout*", "*in service*"])


STARTED = """
import signal, subprocess, sys

def test_started():
    code = "import signal; print(*(int(signal.getsignal(n) is signal.SIG_IGN) for n in (1, 2, 3)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 0 0\\n"
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_under_nohup_programs_start_with_default_signals(pytester: pytest.Pytester, workers: str) -> None:
    pytester.makepyfile(test_one=STARTED)
    ignore = "trap '' HUP INT QUIT; exec \"$@\""
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-n", workers, str(pytester.path)]
    done = subprocess.run(
        ["sh", "-c", ignore, "sh", *command],
        cwd=pytester.path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout
