"""`.ci/weekly`: results of steps that pass, fail, hang, and run no test."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts/weekly.py"


@pytest.fixture(scope="module")
def weekly() -> ModuleType:
    spec = importlib.util.spec_from_file_location("weekly", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["weekly"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("command", "result", "counts"),
    [
        ("echo '== 3 passed, 1 skipped in 0.10s =='; echo '== 2 passed in 9.00s =='", "passed", (5, 0, 1)),
        ("echo '== 1 failed, 3 passed, 2 errors in 0.10s =='; false", "failed", (3, 3, 0)),
        ("echo '== 4 skipped in 0.10s =='", "failed: no test ran", (0, 0, 4)),
        ("echo ready; sleep 1000 & wait", "did not finish in 0 min", (0, 0, 0)),
    ],
)
def test_every_step_has_a_result(
    weekly: ModuleType, tmp_path: Path, command: str, result: str, counts: tuple[int, int, int]
) -> None:
    step = weekly.Step(command, "echo peer 1.2", limit_s=1 if "sleep" in command else 30)
    outcome = weekly.run("a peer", step, tmp_path, tmp_path)
    assert (outcome.step, outcome.version, outcome.result) == ("a peer", "peer 1.2", result)
    assert (outcome.passed, outcome.failed, outcome.skipped) == counts
    assert f"| a peer | peer 1.2 | {result} | {counts[0]} |" in weekly.table([outcome])
    assert (tmp_path / "a-peer.log").exists()


def test_a_step_without_tests_has_no_counts(weekly: ModuleType, tmp_path: Path) -> None:
    outcome = weekly.run("check", weekly.Step("true", "false", 30, pytest=False), tmp_path, tmp_path)
    assert (outcome.version, outcome.result, outcome.passed) == ("not installed", "passed", None)
    assert "| check | not installed | passed | - | - | - |" in weekly.table([outcome])
