"""The hooks in the root's conftest.py: unexpected skips, flaky tests, and signals that `nohup` ignores."""

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
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("ONLY_EXPECTED_SKIPS", raising=False)


def run(pytester: pytest.Pytester, source: str) -> pytest.RunResult:
    pytester.makepyfile(test_one=f"import pytest\n{source}\n")
    return pytester.runpytest_inprocess("-ra", "-p", "no:cacheprovider", "-p", "no:xdist")


SKIPS = """
@pytest.mark.skipif(True, reason="only root may do it")
def test_expected(): pass

def test_unexpected(): pytest.skip("Chromium is not installed")

@pytest.mark.skipif(True, reason="FUSE is missing")
def test_marked(): pass
"""


def test_in_ci_a_skip_fails_unless_its_reason_is_expected(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONLY_EXPECTED_SKIPS", "1")
    done = run(pytester, SKIPS)
    done.assert_outcomes(failed=1, errors=1, skipped=1)  # a mark skips at setup
    report = done.stdout.str()
    assert "unexpected skip (conftest.py): Chromium is not installed" in report
    assert "unexpected skip (conftest.py): FUSE is missing" in report


def test_in_ci_a_file_that_is_skipped_fails_too(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONLY_EXPECTED_SKIPS", "1")
    done = run(pytester, "pytest.importorskip('no_such_peer')")
    done.assert_outcomes(errors=1)
    assert "unexpected skip (conftest.py): could not import 'no_such_peer'" in done.stdout.str()


def test_elsewhere_a_skip_is_a_skip(pytester: pytest.Pytester) -> None:
    run(pytester, SKIPS).assert_outcomes(skipped=3)


def test_a_flaky_test_needs_a_reason(pytester: pytest.Pytester) -> None:
    done = run(pytester, "@pytest.mark.flaky(reruns=1)\ndef test_sometimes(): pass")
    assert "test_sometimes is marked as flaky without a reason" in done.stderr.str()


FLAKY = """
tries = []

@pytest.mark.flaky(reruns=1, reason="an example")
def test_sometimes():
    tries.append(1)
    assert len(tries) == 2, "the first try"
"""


def test_a_flaky_test_runs_twice_and_its_first_failure_is_shown(pytester: pytest.Pytester) -> None:
    report = run(pytester, FLAKY).stdout.str()
    assert "1 passed, 1 rerun" in report
    assert "ran again: test_one.py::test_sometimes" in report and "the first try" in report


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
