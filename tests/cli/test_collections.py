"""Commands for tasks of a resources server: validation without a model, a run with a scripted model."""

import json
from pathlib import Path

import pytest
from fastapi import FastAPI

from prorl_envs.rollout.client.result_files import read_results
from tests.cli.conftest import Cli
from tests.cli.test_scripted import scripted
from tests.support.resources import ResourcesDesk, desk_row
from tests.support.serving import served

#: Several commands in a row, each of which imports everything.
pytestmark = pytest.mark.timeout(300)

REFERENCE = [{"tool": "add", "arguments": {"count": 3}}, {"tool": "read", "arguments": {}}]


def write_files(folder: Path, url: str) -> tuple[str, ...]:
    """Write the settings and the data; return the options that name them."""
    entry = f"{{nemo: {{url: '{url}', finish_tool: read}}, limits: {{max_turns: 4}}}}"
    (folder / "settings.yaml").write_text(f"environments: {{desk: {entry}}}")
    (folder / "rows.jsonl").write_text(json.dumps(desk_row(id="three", reference=REFERENCE)))
    return ("--config", "settings.yaml")


def test_rows_of_a_resources_server_are_validated(cli: Cli, tmp_path: Path) -> None:
    with served(FastAPI(routes=ResourcesDesk().app().routes)) as url:
        config = write_files(tmp_path, url)
        done = cli("validate", "desk", "rows.jsonl", *config)
        assert (done.returncode, "ok" in done.stdout) == (0, True), done.stderr
        (tmp_path / "rows.jsonl").write_text(json.dumps(desk_row(id="four", expected=4, reference=REFERENCE)))
        done = cli("validate", "desk", "rows.jsonl", *config)
        assert done.returncode == 1 and "the reference scores 0" in " ".join(done.stdout.split())
    done = cli("run", "dsek", *config, "--llm", "http://127.0.0.1:1")
    assert done.returncode == 2 and "did you mean desk?" in done.stderr
    done = cli("run", "desk", *config, "--llm", "http://127.0.0.1:1")
    assert done.returncode == 2 and "ships no example data" in done.stderr


@pytest.mark.thorough
def test_tasks_of_a_resources_server_are_run(cli: Cli, tmp_path: Path) -> None:
    with served(FastAPI(routes=ResourcesDesk().app().routes)) as url:
        data = (*write_files(tmp_path, url), "--data", "rows.jsonl")
        with scripted(tmp_path, "desk", *data) as (_, options):
            done = cli("run", "desk", *data, *options, "--samples", "2", "--out", "runs")
    assert done.returncode == 0, done.stderr
    results = list(read_results(tmp_path / "runs" / "results.jsonl"))
    assert [(r.reward, r.task_id) for r in results] == [(1.0, "three")] * 2
