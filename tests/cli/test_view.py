"""`prorl-envs view`: the file it writes, the link it prints, and its mistakes. tests/viewer has the pages."""

import os
import signal
import subprocess
from pathlib import Path

import httpx

from tests.cli.conftest import SCRIPT, Cli
from tests.viewer.conftest import result, written


def test_one_file_of_what_was_chosen(cli: Cli, tmp_path: Path) -> None:
    written(tmp_path / "r.jsonl", result("g/0"), result("g/1"), result("h/0"))
    done = cli("view", "r.jsonl", "--html", "out.html", "--job", "g", "--tokenizer", "scripted")
    assert done.returncode == 0 and "2 episodes" in done.stderr, done.stderr
    page = (tmp_path / "out.html").read_text()
    assert '"job_id": "g/1"' in page and "h/0" not in page and "script-src 'sha256-" in page


def test_mistakes_are_one_clear_error(cli: Cli, tmp_path: Path) -> None:
    written(tmp_path / "r.jsonl", result("g/0"))
    for arguments, word in (
        (("r.jsonl", "--html", "out.html", "--job", "x"), "nothing in r.jsonl fits"),
        (("none.jsonl",), "cannot read none.jsonl"),
        (("r.jsonl", "--html", "no/such/out.html"), "cannot write"),
    ):
        done = cli("view", *arguments)
        assert done.returncode == 2 and word in done.stderr and "hint:" in done.stderr, done.stderr


def test_a_link_until_it_is_interrupted(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", result("g/0"))
    environ = {**os.environ, "COLUMNS": "40"}  # the link stays in one piece
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        [SCRIPT, "view", path], stdout=pipe, stderr=nothing, text=True, env=environ
    ) as serving:
        assert serving.stdout is not None
        link = serving.stdout.readline().strip()
        assert "g/0" in httpx.get(f"{link}api/episodes").json()["entries"][0]
        assert httpx.get(link.rpartition("/")[0][:-1] + "/").status_code == 404
        serving.send_signal(signal.SIGINT)
        serving.wait()
    assert serving.returncode == 130
