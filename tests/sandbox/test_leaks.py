"""The leak check detects each kind of leak."""

import os
import subprocess
from pathlib import Path

from tests.support.leaks import OpenResources, leaks_since


def test_a_clean_state_is_no_leak(run_dir: Path) -> None:
    before = OpenResources.now(run_dir)
    subprocess.run(["true"], check=True)
    assert leaks_since(before, run_dir) == []


def test_a_leaked_process_descriptor_and_directory_are_found(run_dir: Path) -> None:
    before = OpenResources.now(run_dir)
    reader, writer = os.pipe()
    left = run_dir / "left"
    left.mkdir()
    with subprocess.Popen(["sleep", "600"]) as process:
        leaks = leaks_since(before, run_dir, patience_s=0)
        process.kill()
    left.rmdir()
    os.close(reader)
    os.close(writer)
    kinds = [leak.split()[0] for leak in leaks]
    assert sorted(kinds) == ["descriptor", "descriptor", "directory", "process"]
    assert str(process.pid) in leaks[0]


def test_a_descriptor_that_moved_is_no_leak(run_dir: Path) -> None:
    reader, writer = os.pipe()
    before = OpenResources.now(run_dir)
    moved = os.dup(reader)
    os.close(reader)
    assert leaks_since(before, run_dir, patience_s=0) == []
    second = os.dup(moved)
    assert leaks_since(before, run_dir, patience_s=0) != []
    for fd in (moved, second, writer):
        os.close(fd)
