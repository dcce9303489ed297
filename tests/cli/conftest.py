"""The command line as a user has it: the installed console script, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).with_name("prorl-envs")

type Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs `prorl-envs` in an empty folder and returns how it ended."""

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
