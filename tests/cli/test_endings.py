"""Stopped commands leave no processes, mounts or folders; the `no_leaks` fixture checks this."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prorl_envs.sandbox.filesystem.directories import sweep
from tests.cli.conftest import SCRIPT


@contextmanager
def demo(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a demo; yield once it has submitted its groups."""
    process = subprocess.Popen(
        [SCRIPT, "demo", "--swebench", "0", "--out", str(folder)],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if line.startswith("submitting"):
                    break
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def wait_for_sandboxes(run_dir: Path) -> None:
    """Wait until a sandbox has its files. The test's own timeout limits the wait."""
    while not any(run_dir.glob("prorl-sandboxes-*/*/work")):
        os.sched_yield()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_nothing(tmp_path: Path, run_dir: Path, number: signal.Signals) -> None:
    with demo(tmp_path) as process:
        wait_for_sandboxes(run_dir)
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "all running work was stopped" in said


def test_repeated_interrupts_leave_nothing(tmp_path: Path, run_dir: Path) -> None:
    with demo(tmp_path) as process:
        wait_for_sandboxes(run_dir)
        for _ in range(5):
            os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130


def test_a_killed_service_leaves_only_files_that_the_next_one_removes(tmp_path: Path, run_dir: Path) -> None:
    with demo(tmp_path) as process:
        wait_for_sandboxes(run_dir)
        process.kill()
        process.communicate(timeout=60)
    # The fixture checks processes and mounts; directories survive the kill of their process.
    left = list(run_dir.glob("prorl-sandboxes-*"))
    assert sweep(run_dir) == left and len(left) == 1


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(("arguments", "status"), [(("envs",), 0), (("show", "nothing"), 2)])
def test_a_reader_that_has_gone_changes_no_exit_status(
    tmp_path: Path, arguments: tuple[str, ...], status: int, stream: str
) -> None:
    """Without care, Python would exit with 120 because it cannot flush a stream, and Rich with 1."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [SCRIPT, *arguments],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=writer if stream == "stdout" else subprocess.PIPE,
        stderr=writer if stream == "stderr" else subprocess.PIPE,
        check=False,
        timeout=60,
    )
    os.close(writer)
    assert done.returncode == status
    assert b"Exception ignored" not in (done.stderr or b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["settings", "envs --json"])
def test_a_full_disk_is_reported_in_one_sentence(command: str, unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [SCRIPT, *command.split()],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 2, done.stderr
    assert "No space left on device" in done.stderr and "free space" in done.stderr
