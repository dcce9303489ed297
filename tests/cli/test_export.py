"""`prorl-envs export` as a user runs it: sources, refusals, and memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import SCRIPT, Cli
from tests.viewer.conftest import result, written

FORMATS = ("csv", "parquet", "hf", "sft", "atif")
RUN = '{"name": "r", "environment": "bash", "model": "m", "started": "2026-11-25", "version": "0.1.0"}'


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "latest"
    folder.mkdir(parents=True)
    written(folder / "results.jsonl", result("g/0"), result("g/1", reward=0.0))
    (folder / "run.json").write_text(RUN)
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "format_", [pytest.param(one, marks=[pytest.mark.thorough] * (one != "csv")) for one in FORMATS]
)
def test_every_format_is_written_once(cli: Cli, tmp_path: Path, run_folder: Path, format_: str) -> None:
    target = tmp_path / "new" / "out"
    command = ("export", "runs/latest", "--to", format_, "--out", str(target))
    done = cli(*command)
    assert done.returncode == 0 and done.stderr == f"{target}: 2 rollouts\n"
    again = cli(*command)
    assert again.returncode == 2 and "exists" in again.stderr and "--force" in again.stderr
    filtered = cli(*command, "--force", "--min-reward", "0.5")
    assert filtered.stderr == f"{target}: 1 rollout, 1 below --min-reward left out\n"
    assert names(target.parent) == {"out"}


def test_the_model_of_a_run_is_in_its_trajectories(cli: Cli, tmp_path: Path, run_folder: Path) -> None:
    assert cli("export", "runs/latest", "--to", "atif", "--out", "atif").returncode == 0
    agent = json.loads((tmp_path / "atif/g/0.json").read_text())["agent"]
    assert (agent["model_name"], agent["version"]) == ("m", "0.1.0")


def test_other_refusals(cli: Cli, tmp_path: Path) -> None:
    written(tmp_path / "r.jsonl", result("g/0"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    for arguments, words in {
        ("missing.jsonl", "csv", "t.csv"): "cannot read missing.jsonl",
        ("r.jsonl", "csv", "mine"): "it is a folder",
        ("r.jsonl", "hf", "mine", "--force"): "was not written by an export",
        ("r.jsonl", "sft", "t.jsonl", "--min-reward", "2"): "there is no rollout to export",
        ("r.jsonl", "csv", "/proc/t.csv"): "cannot write /proc/t.csv",
    }.items():
        source, format_, target, *rest = arguments
        done = cli("export", source, "--to", format_, "--out", target, *rest)
        assert done.returncode == 2 and words in done.stderr and "hint: " in done.stderr, done.stderr
    assert names(tmp_path) == {"r.jsonl", "mine"} and names(tmp_path / "mine") == {"thesis.tex"}


def test_a_missing_pyarrow_is_an_error_with_a_hint(tmp_path: Path) -> None:
    written(tmp_path / "r.jsonl", result("g/0"))
    program = "import sys; sys.modules['pyarrow'] = None; from prorl_envs.cli.main import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", program, "export", "r.jsonl", "--to", "parquet", "--out", "t.parquet"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "[parquet]" in done.stderr.replace("\n", "")
    assert names(tmp_path) == {"r.jsonl"}


def peak_memory(folder: Path, *arguments: str) -> int:
    """Return the peak resident memory of a command, in bytes."""
    process = subprocess.Popen([SCRIPT, *arguments], cwd=folder, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


@pytest.mark.thorough
@pytest.mark.parametrize("format_", FORMATS)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, format_: str) -> None:
    """The export of 90 MB of results with long conversations needs little more memory than that of 9 MB."""
    messages = [{"role": "user", "content": "x" * 300_000}, {"role": "assistant", "content": "y"}]
    lines = result("g/0", messages=messages).model_dump_json() + "\n"
    for name, count in (("small", 30), ("large", 300)):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for number in range(count):
                file.write(lines.replace('"g/0"', f'"g/{number}"'))
    small, large = (
        peak_memory(tmp_path, "export", f"{name}.jsonl", "--to", format_, "--out", f"{name}.out")
        for name in ("small", "large")
    )
    assert large - small < 60 << 20
