"""Fixtures for tests with real frameworks. `make test-frameworks` runs each file in its own environment."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prorl_envs.integrations import sandbox
from tests.sandbox.rootfs import PROGRAMS, write_rootfs

# Otherwise there is no framework to import.
collect_ignore_glob = [] if "TEST_FRAMEWORK" in os.environ else ["test_*.py"]

_MORE = (
    "chmod", "chown", "cp", "cut", "dirname", "echo", "env", "find", "grep", "gzip", "head", "mv", "printf",
    "ps", "pwd", "rmdir", "sed", "tail", "tar", "test", "touch", "true", "wc", "whoami",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Do not check leaks after each test: the node stays open, and frameworks leak resources themselves."""
    yield


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system of this machine's programs."""
    return write_rootfs(tmp_path_factory.mktemp("base") / "root", (*PROGRAMS, *_MORE))


@pytest.fixture(scope="session", autouse=True)
def settings(base: Path, run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The settings of the node, by environment variables: the image `base:1`, and directories of its own."""
    variables = {
        "PRORL_IMAGES__BASES": f'{{"base:1": {base}}}',
        "PRORL_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
    assert not sandbox._users and sandbox._runner._thread is None  # the node closed with the last sandbox


@pytest.fixture
def remains(tmp_path: Path) -> Callable[[str], None]:
    """Run a program that starts `sleep 98765` in a sandbox and prints `ready`: kill it, then let another end.

    Check that no process remains, and in the end no directory: a start removes those of killed processes.
    """

    def run(program: str) -> None:
        place = tmp_path / "r"
        place.mkdir()
        for end in (signal.SIGKILL, signal.SIGCONT):
            child = subprocess.Popen(
                [sys.executable, "-c", program], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "PRORL_RUN_DIR": str(place)}, text=True,
            )  # fmt: skip
            assert child.stdout is not None and child.stdin is not None
            with child.stdout, child.stdin:
                assert any(line.strip() == "ready" for line in child.stdout)
                assert list(place.iterdir()) and _sleeping()
                child.send_signal(end)
                child.stdin.write("\n") if end == signal.SIGCONT else None
            assert child.wait(60) == (-end if end == signal.SIGKILL else 0)
            deadline = time.monotonic() + 20
            while _sleeping() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not _sleeping() and str(place) not in Path("/proc/self/mountinfo").read_text()
        assert not list(place.iterdir())

    return run


def _sleeping() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"sleep\0098765" in (entry / "cmdline").read_bytes():
                found.append(entry.name)
    return found
