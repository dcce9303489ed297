"""The tutorial's blocks, run in order in one shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = "python - <<'PROGRAM'\n{}PROGRAM\n"


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_every_block_runs_with_the_described_effect(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    script = ["set -em", "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT"]
    script += [body if language == "bash" else PYTHON.format(body) for language, body in blocks]
    done = subprocess.run(
        ["timeout", "200", "bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    episodes = re.findall(r"^\S+/(?:largest|count)/\d (\S+) .* drift 0$", done.stdout, re.MULTILINE)
    assert sorted(episodes) == ["0.0"] * 4 + ["1.0"] * 8
    assert "[0.0, 0.0, 0.0, 0.0]" in done.stdout
    assert (tmp_path / "episodes.html").stat().st_size > 10_000
