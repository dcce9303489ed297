"""`prorl-envs view`: the file it writes, the link it prints, and its errors. tests/viewer tests the pages."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.cli.conftest import SCRIPT, Cli
from tests.viewer.conftest import result, written


def test_chosen_results_become_one_file(cli: Cli, tmp_path: Path) -> None:
    written(tmp_path / "r.jsonl", result("g/0"), result("g/1"), result("h/0"))
    done = cli("view", "r.jsonl", "--html", "out.html", "--job", "g", "--tokenizer", "scripted")
    assert done.returncode == 0 and "2 episodes" in done.stderr, done.stderr
    page = (tmp_path / "out.html").read_text()
    assert '"job_id": "g/1"' in page and "h/0" not in page and "script-src 'sha256-" in page


def test_mistakes_are_one_clear_error(cli: Cli, tmp_path: Path) -> None:
    written(tmp_path / "r.jsonl", result("g/0"))
    for arguments, word in (
        (("r.jsonl", "--html", "out.html", "--job", "x"), "no episode of r.jsonl matches"),
        (("none.jsonl",), "cannot read none.jsonl"),
        (("r.jsonl", "--html", "no/such/out.html"), "cannot write"),
    ):
        done = cli("view", *arguments)
        assert done.returncode == 2 and word in done.stderr and "hint:" in done.stderr, done.stderr


def test_runs_of_a_folder_are_served_but_not_one_file(cli: Cli, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        written(tmp_path / "runs" / name / "results.jsonl", result(f"{name}/0"))
    done = cli("view", "runs", "--html", "out.html")
    assert done.returncode == 2 and "several runs" in done.stderr and "hint:" in done.stderr
    with _viewing(tmp_path / "runs") as (link, _):
        runs = httpx.get(f"{link}api/runs").json()["runs"]
        assert sorted(run["name"] for run in runs) == ["one", "two"]
        assert "two/0" in httpx.get(f"{link}run/two/api/episodes").json()["entries"][0]
        for path in ("run/three/", "run/..%2Ftwo/", "run/%2e%2e/"):
            assert httpx.get(f"{link}{path}").status_code in (404, 422), path


def test_a_link_is_served_until_an_interrupt(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", result("g/0"))
    with _viewing(path) as (link, serving):
        assert "g/0" in httpx.get(f"{link}api/episodes").json()["entries"][0]
        assert httpx.get(link.rpartition("/")[0][:-1] + "/").status_code == 404
    assert serving.returncode == 130


@contextmanager
def _viewing(path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `prorl-envs view PATH` until the block ends; yield its link."""
    environ = {**os.environ, "COLUMNS": "40"}  # the link stays in one piece
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        [SCRIPT, "view", path], stdout=pipe, stderr=nothing, text=True, env=environ
    ) as serving:
        assert serving.stdout is not None
        yield serving.stdout.readline().strip(), serving
        serving.send_signal(signal.SIGINT)
        serving.wait()
