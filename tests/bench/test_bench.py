"""The benches with real sandboxes, small numbers, and no peers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.catalogue import Entry
from bench.process import ROOT, SubjectError, SubjectProcess

SMALL = (
    "--rounds",
    "1",
    "--sessions",
    "2",
    "--rate-rounds",
    "1",
    "--rate-s",
    "0.1",
    "--idle",
    "2",
    "--live",
    "3",
)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bench", *SMALL, *options]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.thorough
def test_actions_and_starts_are_measured_and_all_answers_are_right(tmp_path: Path) -> None:
    data = tmp_path / "data.json"
    done = run(
        "--only", "bash,ready", "--subjects", "floor pty,floor bwrap,ours bash,ours pool", "--json", str(data)
    )
    assert done.returncode == 0, done.stderr
    assert "## 1. A bash action" in done.stdout
    found = json.loads(data.read_text())
    for key in ("floor pty", "floor bwrap", "ours bash"):
        row = found["bash"]["rows"][key]
        assert row["seconds"] and row["rates"] and not row["failed"], row
        assert not row["wrong"]
    assert found["ready"]["rows"]["ours bash"]["ready"]
    pool = found["ready"]["rows"]["ours pool"]
    assert pool["ready"] or pool["failed"].startswith("not built")


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read the memory of tool servers")
def test_memory_is_counted_and_no_process_is_leaked(tmp_path: Path) -> None:
    data = tmp_path / "data.json"
    done = run("--only", "memory", "--subjects", "ours bash", "--json", str(data))
    assert done.returncode == 0, done.stderr
    row = json.loads(data.read_text())["memory"]["rows"]["ours bash"]
    assert row["memory"]["live"] == 3
    assert 0 < row["memory"]["pss"] < 20e6  # shared pages count less, the more processes share them
    assert row["memory"]["processes"] >= 3  # the sandbox's first process, its maker, its bash
    assert not row["left"]


def test_a_peer_that_is_not_installed_is_reported_with_the_reason() -> None:
    with pytest.raises(SubjectError, match=r"not installed: run scripts/setup-bench\.sh"):
        SubjectProcess(Entry("nowhere", "", "nowhere"), Path("/nonexistent"), None)


def test_a_subject_that_exits_is_reported_with_the_reason(tmp_path: Path) -> None:
    subject = SubjectProcess(Entry("nowhere", "", "nowhere", peer=False), tmp_path, None)
    with pytest.raises(SubjectError, match=r"No module named bench\.subjects\.nowhere"):
        subject.ask("prepare", timeout_s=60)
    assert subject.close() == []
