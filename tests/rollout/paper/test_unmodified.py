"""The paper's own clients, unmodified: PAPER_SERVER_SOURCE names a checkout of NVIDIA-NeMo/ProRL-Agent-Server
with `scripts/run_math.py`, PAPER_SERVER_PYTHON an interpreter with aiohttp, pandas and pyarrow."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from prorl_envs.env.registry import example_path
from tests.cli.conftest import SCRIPT
from tests.rollout.paper.conftest import START_SERVER, model_of
from tests.rollout.paper.requests import Body, code_rows, math_rows, script_requests, swe_row

if "PAPER_SERVER_SOURCE" not in os.environ:
    pytest.skip("PAPER_SERVER_SOURCE names no checkout of ProRL Agent Server", allow_module_level=True)
SCRIPTS = Path(os.environ["PAPER_SERVER_SOURCE"]).resolve() / "scripts"
PYTHON = os.environ.get("PAPER_SERVER_PYTHON", sys.executable)
RECORDER = Path(__file__).with_name("recorder.py")

pytestmark = pytest.mark.timeout(500)


def run(
    folder: Path, script: str, start: Path, rows: Sequence[Body], llm: str, variables: dict[str, str]
) -> str:
    """Run a script of the checkout with `start` in place of its server.

    Returns:
        its output.
    """
    shutil.copy(SCRIPTS / script, folder)
    shutil.copy(start, folder / "start_server.py")
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    table = "import json, pandas; pandas.DataFrame(json.load(open('rows.json'))).to_parquet('rows.parquet')"
    subprocess.run([PYTHON, "-c", table], cwd=folder, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--dataset-path", "rows.parquet", "--port", str(port), "--llm-addresses", llm]
    done = subprocess.run(
        [PYTHON, script, *options],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", ["run_math.py", "run_swe.py"])
def test_the_clients_send_the_recorded_requests(tmp_path: Path, script: str) -> None:
    record, llm = tmp_path / "record", "http://127.0.0.1:8000/v1"
    rows = math_rows()
    table = [{"instance": row} for row in rows] if script == "run_swe.py" else rows
    run(tmp_path, script, RECORDER, table, llm, {**os.environ, "RECORD": str(record)})
    sent = sorted((json.loads(line) for line in record.read_text().splitlines()), key=str)
    assert sent == sorted(([path, body] for path, body in script_requests(rows, llm)), key=str)


def test_run_math_resolves_all_problems(tmp_path: Path) -> None:
    with model_of(tmp_path, "math", math_rows()) as (llm, variables):
        printed = run(tmp_path, "run_math.py", START_SERVER, math_rows(), llm, variables)
    assert "Resolved 4" in printed


def test_run_math_resolves_all_programs(tmp_path: Path) -> None:
    rows = [row for row, _ in code_rows()]
    solved = [{**row, "solutions": json.dumps([solution])} for row, solution in code_rows()]
    with model_of(tmp_path, "code", solved) as (llm, variables):
        printed = run(tmp_path, "run_math.py", START_SERVER, rows, llm, variables)
    assert "Resolved 4" in printed


def test_run_swe_resolves_all_instances(tmp_path: Path) -> None:
    """Two instances twice: building them takes a minute."""
    instances = [json.loads(line) for line in example_path("swebench").read_text("utf-8").splitlines()[:2]]
    table = [{"instance": swe_row(row), "ability": "coding"} for row in instances * 2]
    with model_of(tmp_path, "swebench", instances) as (llm, variables):
        subprocess.run(
            [SCRIPT, "prepare", "swebench", "swebench.jsonl"], cwd=tmp_path, env=variables, check=True
        )
        printed = run(tmp_path, "run_swe.py", START_SERVER, table, llm, variables)
    assert "Resolved 4" in printed
