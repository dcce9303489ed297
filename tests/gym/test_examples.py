"""The examples run unmodified."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "evaluate": "reward 1",
    "loop": "reward 1: {'1-file_equals': 1.0}",
    "vector": "masked (truncated)",
}


def test_each_example_is_listed_here_and_on_the_page() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)
    assert all(f"]({name}.py)" in (EXAMPLES / "README.md").read_text() for name in SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout and (name != "vector" or "reward 1" in done.stdout), done.stdout
