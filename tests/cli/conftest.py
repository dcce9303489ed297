"""Fixtures that run the command line, either as the installed console script or in this process."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from prorl_envs.cli.main import app
from tests.places import drivers_directory

SCRIPT = Path(sys.executable).with_name("prorl-envs")


class Done(NamedTuple):
    """Outcome of a command that ran in this process."""

    code: int
    out: str
    err: str


type FastCli = Callable[..., Done]
type Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module", autouse=True)
def run_dir() -> Iterator[Path]:
    """Directory in memory, because each command has its own driver."""
    yield from drivers_directory(in_memory=True)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run `prorl-envs` in an empty folder; return its outcome."""

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SCRIPT, *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "100"},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run


@pytest.fixture
def fast_cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[FastCli]:
    """Run `prorl-envs` in this process, in an empty folder, which saves the time of its start."""
    handlers, level = logging.root.handlers[:], logging.root.level

    def run(*arguments: str) -> Done:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["prorl-envs", *arguments])
        with pytest.raises(SystemExit) as ended:
            app()
        said = capsys.readouterr()
        return Done(int(ended.value.code or 0), said.out, said.err)

    yield run
    # `serve` logs to this test's standard error, which is closed after the test.
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
