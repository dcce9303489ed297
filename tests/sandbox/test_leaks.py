"""The leak check itself: it sees each kind of leak."""

import os
import subprocess
from pathlib import Path

from prorl_envs.testing.leaks import Holdings, leaks_since


def test_nothing_left_is_no_leak(run_dir: Path) -> None:
    before = Holdings.now(run_dir)
    subprocess.run(["true"], check=True)
    assert leaks_since(before, run_dir) == []


def test_a_process_a_descriptor_and_a_directory_are_seen(run_dir: Path) -> None:
    before = Holdings.now(run_dir)
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
