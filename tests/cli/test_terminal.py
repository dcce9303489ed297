"""The commands of envs/terminal/README.md, on a folder of task directories."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_envs.env.registry import example_path
from prorl_envs.rollout.client.result_files import read_results
from tests.cli.conftest import Cli
from tests.cli.test_scripted import scripted
from tests.sandbox.rootfs import PROGRAMS, write_rootfs

pytestmark = pytest.mark.timeout(300)

#: Example tasks whose images need no network.
TASKS = ("hello", "longest-lines", "mend-backup", "two-steps")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rootfs(tmp_path_factory.mktemp("base") / "root", (*PROGRAMS, "base64"))


@pytest.fixture
def folder(tmp_path: Path, base: Path) -> Iterator[Path]:
    """Folder with settings and `tasks/`, and its own cache of images."""
    (tmp_path / "settings.yaml").write_text(
        f"cache_dir: {tmp_path}/cache\nimages: {{bases: {{'debian:12-slim': {base}}}}}\n"
    )
    for name in TASKS:
        shutil.copytree(example_path("terminal") / name, tmp_path / "tasks" / name)
    yield tmp_path
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def test_a_folder_of_tasks_is_listed_prepared_and_validated(cli: Cli, folder: Path) -> None:
    config = ("--config", "settings.yaml")
    listed = cli("tasks", "terminal", "--data", "tasks/", *config)
    assert listed.returncode == 0, listed.stderr
    assert "4 of 4 tasks" in listed.stderr and all(name in listed.stdout for name in TASKS)
    rows = cli("tasks", "terminal", "--data", "tasks/", "--runnable", "--json", *config)
    (folder / "rows.jsonl").write_text(rows.stdout)
    assert "4 of 4 tasks" in cli("tasks", "terminal", "--data", "rows.jsonl", *config).stderr
    prepared = cli("prepare", "terminal", "tasks/", *config)
    assert prepared.returncode == 0, prepared.stderr
    validated = cli("validate", "terminal", "tasks/", "--json", *config)
    assert validated.returncode == 0, validated.stderr
    verdicts = json.loads(validated.stdout)
    assert [one["task_id"] for one in verdicts] == list(TASKS)
    assert all(one["reference"] == [1, 1] and one["untouched"] == 0 for one in verdicts)


def test_a_failed_build_shows_the_ends_of_its_output(cli: Cli, folder: Path) -> None:
    dockerfile = folder / "tasks" / "hello" / "environment" / "Dockerfile"
    dockerfile.write_text("FROM debian:12-slim\nRUN for i in 1 2 3 4 5 6; do echo line$i; done; exit 3\n")
    for name in ("longest-lines", "mend-backup", "two-steps"):
        shutil.rmtree(folder / "tasks" / name)
    shutil.copytree(folder / "tasks" / "hello", folder / "tasks" / "hello-again")
    done = cli("prepare", "terminal", "tasks", "--config", "settings.yaml")
    assert done.returncode == 1 and "2 failed" in done.stderr
    (cause,) = [line for line in done.stdout.splitlines() if "RUN failed with exit status 3" in line]
    assert cause.startswith("failed: hello, hello-again: ") and "environment/Dockerfile:2: " in cause
    assert "line6" in done.stdout and "line3" not in done.stdout + done.stderr
    log = Path(done.stderr.rpartition("the whole text of each failure: ")[2].splitlines()[0])
    try:
        assert log.read_text().count("line3\n") == 2
    finally:
        log.unlink()


@pytest.mark.thorough
def test_a_model_runs_a_folder_of_tasks(cli: Cli, folder: Path) -> None:
    with scripted(folder, "terminal", "--data", "tasks/", "--mix", "solve=1,wrong=1") as (_, options):
        done = cli(
            "run", "terminal", "--data", "tasks/", *options,
            "--samples", "2", "--out", "run", "--config", "settings.yaml",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = list(read_results(folder / "run"))
    assert sorted(one.reward or 0 for one in results) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all(row.ids for one in results for row in one.rows)


def test_tasks_that_cannot_run_are_listed_with_all_reasons(cli: Cli, folder: Path) -> None:
    hello = folder / "tasks" / "hello"
    (hello / "task.toml").write_text('[environment]\ngpus = 1\n[environment.env]\nA = "${KEY}"\n')
    (folder / "tasks" / "two-steps" / "task.toml").write_text("[environment\n")
    done = cli("tasks", "./tasks")
    assert done.returncode == 0, done.stderr
    assert "3 of 3 tasks" in done.stderr
    assert "1 cannot run here: it needs a GPU; the variable KEY has no value" in " ".join(done.stderr.split())
    assert "two-steps cannot be read: task.toml: " in done.stderr
    runnable = cli("tasks", "./tasks", "--runnable", "--json")
    assert [json.loads(line)["id"] for line in runnable.stdout.splitlines()] == [
        "longest-lines",
        "mend-backup",
    ]
