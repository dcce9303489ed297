"""`make test-full`: results of parts that pass, fail, hang, or run no test, and resumed runs."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts/test_full.py"


@pytest.fixture(scope="module")
def full() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_full_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["test_full_script"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("command", "result", "counts"),
    [
        ("echo '== 3 passed, 1 skipped in 0.10s =='; echo '== 2 passed, 1 rerun in 9s (9:00.00) in 9.00s =='",
         "passed", (5, 0, 1, 1)),
        ("echo '== 1 failed, 3 passed, 2 errors in 0.10s =='; false", "failed", (3, 3, 0, 0)),
        ("echo '== 4 skipped in 0.10s =='", "failed: no test ran", (0, 0, 0, 4)),
        ("echo ready; sleep 1000 & wait", "did not finish in 0 min", (0, 0, 0, 0)),
    ],
)  # fmt: skip
def test_every_part_has_a_result(
    full: ModuleType, tmp_path: Path, command: str, result: str, counts: tuple[int, int, int, int]
) -> None:
    part = full.Part(command, limit_s=1 if "sleep" in command else 30)
    outcome = full.run("a peer", part, tmp_path, tmp_path)
    assert (outcome.part, outcome.result) == ("a peer", result)
    assert (outcome.passed, outcome.failed, outcome.rerun, outcome.skipped) == counts
    assert f"| a peer | {result} | {counts[0]} | {counts[1]} |" in full.table([outcome])
    assert (tmp_path / "a-peer.log").exists()


def test_variables_of_the_make_that_runs_the_parts_are_not_theirs(
    full: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "MAKEFLAGS": " -- ARGS=x",
        "MAKEOVERRIDES": "x",
        "MFLAGS": "x",
        "ARGS": "--only docs",
    }.items():
        monkeypatch.setenv(name, value)
    makefile = tmp_path / "Makefile"
    makefile.write_text("all:\n\t@echo given: $(ARGS)\n")
    full.run("a", full.Part(f"make -f {makefile}", 30, pytest=False), tmp_path, tmp_path)
    assert (tmp_path / "a.log").read_text() == "given:\n"


def test_a_part_without_tests_has_no_counts(full: ModuleType, tmp_path: Path) -> None:
    outcome = full.run("check", full.Part("true", 30, pytest=False), tmp_path, tmp_path)
    assert (outcome.result, outcome.passed) == ("passed", None)
    assert "| check | passed | - | - | - | - |" in full.table([outcome])


def test_reasons_of_skips_are_listed_with_their_numbers(full: ModuleType, tmp_path: Path) -> None:
    line = "SKIPPED [2] tests/a.py:3: Chromium is not installed"
    outcome = full.run("a", full.Part(f"echo '{line}'; echo '{line}'", 30), tmp_path, tmp_path)
    assert "- a: 4 × Chromium is not installed" in full.table([outcome])


def test_each_test_that_ran_again_is_named(full: ModuleType, tmp_path: Path) -> None:
    line = "____ ran again: tests/a.py::test_one[x (y) z] (call) ____"
    outcome = full.run("a", full.Part(f"echo '{line}'", 30), tmp_path, tmp_path)
    assert "- a: `tests/a.py::test_one[x (y) z]`" in full.table([outcome])


def test_only_parts_that_passed_on_the_same_files_are_left_out(full: ModuleType, tmp_path: Path) -> None:
    good = full.run("a", full.Part("true", 30, pytest=False), tmp_path, tmp_path, "tree")
    bad = full.run("b", full.Part("false", 30, pytest=False), tmp_path, tmp_path, "tree")
    path = tmp_path / "results.json"
    path.write_text(json.dumps([dataclasses.asdict(one) for one in (good, bad)]))
    assert full.passed_before(path, "tree") == {"a": good}
    assert full.passed_before(path, "other") == full.passed_before(path, "") == {}
    assert full.passed_before(tmp_path / "none.json", "tree") == {}


def test_each_thorough_test_is_in_one_part(full: ModuleType) -> None:
    """Every directory of tests is named by one part, or left to "rest"."""
    rest = full.PARTS["rest"].command
    for paths in full._APART.values():
        for path in paths.split():
            assert (SCRIPT.parent.parent / path).is_dir()
            assert f"--ignore={path}" in rest
