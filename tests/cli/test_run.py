"""`prorl-envs run` against a scripted model: its folder, resumption after interruptions, its options."""

import json
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_envs.rollout.client.result_files import read_results
from prorl_envs.runs.folder import run_groups
from prorl_envs.sandbox.filesystem.directories import sweep
from tests.cli.conftest import SCRIPT, Cli, FastCli
from tests.cli.test_scripted import scripted
from tests.support.kernel import write_kernel_files

#: Several commands in a row, each of which imports everything.
pytestmark = pytest.mark.timeout(300)

SAMPLES, TASKS = 4, 3
SMALL = ("--samples", str(SAMPLES), "--limit", str(TASKS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The options that name a scripted model."""
    with scripted(tmp_path_factory.mktemp("model"), "bash", "--mix", "solve=2,wrong=1") as (_, options):
        yield options


def samples_of(folder: Path) -> Counter[tuple[str, int]]:
    """Return the number of results of each sample in the folder of a run."""
    return Counter((one.task_id, one.sample) for one in read_results(folder))


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SCRIPT, "run", "bash", *arguments],
        cwd=folder,
        env=os.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_results(process: subprocess.Popen[str], path: Path, count: int) -> None:
    """Wait until the file has `count` lines or the process has ended."""
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        os.sched_yield()


def test_a_run_gets_a_folder_of_its_own_and_a_summary(cli: Cli, tmp_path: Path, model: list[str]) -> None:
    done = cli("run", "bash", *model, *SMALL)
    assert done.returncode == 0, done.stderr
    (folder,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert (tmp_path / "runs" / "latest").resolve() == folder
    assert samples_of(folder).total() == len(samples_of(folder)) == SAMPLES * TASKS
    summary = json.loads((folder / "summary.json").read_text())
    results = list(read_results(folder))
    rewards = [one.reward for one in results if one.reward is not None]
    assert summary["overall"]["mean_reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert summary["overall"]["sampled_tokens"] == sum(sum(row.loss_mask) for r in results for row in r.rows)
    assert (summary["expected"], summary["model"], set(summary["environments"])) == (12, "scripted", {"bash"})
    assert "pass@4" in done.stdout and "±" in done.stdout
    shown = cli("show", "runs/latest", results[0].job_id)
    assert shown.returncode == 0 and results[0].job_id in shown.stdout


def test_a_jupyter_kernel_of_the_settings(cli: Cli, tmp_path: Path) -> None:
    settings, data = write_kernel_files(tmp_path)
    given = ("kernel", "--config", str(settings), "--data", str(data))
    with scripted(tmp_path, *given) as (_, options):
        done = cli("run", *given, *options, "--samples", "1", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert [one.reward for one in read_results(tmp_path / "out")] == [1.0]


def test_results_are_never_overwritten(cli: Cli, tmp_path: Path, model: list[str]) -> None:
    command = ("run", "bash", *model, *SMALL, "--out", "out")
    assert cli(*command).returncode == 0
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    again = cli(*command)
    assert again.returncode == 2 and "has the results of a run" in again.stderr and "--resume" in again.stderr
    resumed = cli(*command, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.thorough),
        pytest.param(signal.SIGKILL, marks=pytest.mark.thorough),
    ],
)
def test_an_interrupted_run_keeps_its_results_and_is_resumed(
    cli: Cli, tmp_path: Path, model: list[str], number: signal.Signals
) -> None:
    command = (*model, *SMALL, "--out", "out", "--concurrency", "2")
    with start(tmp_path, *command) as process:
        wait_for_results(process, tmp_path / "out" / "results.jsonl", 2)
        os.killpg(process.pid, number)
        said = process.communicate(timeout=60)[1]
    kept = samples_of(tmp_path / "out")
    assert 2 <= kept.total() < SAMPLES * TASKS
    if number is not signal.SIGKILL:
        assert f"{kept.total()} of 12 results are in out" in said and "--resume --out out" in said
    done = cli("run", "bash", *command, "--resume")
    assert done.returncode == 0, done.stderr
    samples = samples_of(tmp_path / "out")
    assert set(samples.values()) == {1} and samples.total() == 12 and kept <= samples


def kill_at(folder: Path, command: tuple[str, ...], seconds: float) -> None:
    with start(
        folder, *command, *(["--resume"] if (folder / "out" / "run.json").exists() else [])
    ) as process:
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_a_run_killed_at_50_random_moments_has_each_sample_once(
    cli: Cli, tmp_path: Path, run_dir: Path, model: list[str]
) -> None:
    command = (*model, "--samples", "16", "--limit", "8", "--out", "out", "--concurrency", "1")
    moments, seen = random.Random(22), Counter[tuple[str, int]]()
    for _ in range(50):
        kill_at(tmp_path, command, moments.uniform(0.5, 4.0))
        if (tmp_path / "out" / "run.json").exists():
            now = samples_of(tmp_path / "out") if complete(tmp_path / "out" / "results.jsonl") else seen
            assert seen <= now, "a result was lost"
            seen = now
    done = cli("run", "bash", *command[:-2], "--resume")
    assert done.returncode == 0, done.stderr
    samples = samples_of(tmp_path / "out")
    assert set(samples.values()) == {1} and samples.total() == 16 * 8 and seen <= samples
    remove_young_directories(run_dir)


def remove_young_directories(run_dir: Path) -> None:
    """Remove the unfinished directory of a killed service. The next service removes it after a minute."""
    for path in run_dir.glob("prorl-sandboxes-*"):
        os.utime(path, (0, 0))
    sweep(run_dir)


def complete(path: Path) -> bool:
    """Whether the last line of the file is complete."""
    content = path.read_bytes()
    return not content or content.endswith(b"\n")


def test_an_agent_of_an_environment_is_run(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("environments: {bash: {agents: [codeact]}}")
    with scripted(tmp_path, "bash") as (_, options):
        done = cli(
            "run", "bash@codeact", *options, "--config", "settings.yaml", "--limit", "1", "--out", "out"
        )
    assert done.returncode == 0, done.stderr
    (one,) = read_results(tmp_path / "out")
    assert one.environment == "bash@codeact" and one.failure is None


def test_tasks_and_sampling_can_be_set(cli: Cli, tmp_path: Path, model: list[str]) -> None:
    chosen = ("--task", "git-rescue", "--task", "greeting")
    sampling = ("--seed", "7", "--top-p", "0.9", "--max-tokens", "900", "--temperature", "0.5")
    done = cli("run", "bash", *model, *chosen, *sampling, "--out", "out")
    assert done.returncode == 0, done.stderr
    groups = run_groups(tmp_path / "out")
    assert {group.task["id"] for group in groups} == {"git-rescue", "greeting"}
    stated = {"seed": 7, "top_p": 0.9, "max_tokens": 900, "temperature": 0.5}
    assert all(group.sampling.model_dump() == stated for group in groups)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--task", "nonsense"), "no task has the id 'nonsense'"),
        (("--top-p", "2"), "--top-p: "),
        (("--retry-failed",), "add --resume"),
        (("--resume", "--out", "nowhere"), "nowhere holds no run"),
        (("--concurrency", "2", "--service", "http://127.0.0.1:9"), "has its own"),
    ],
)
def test_wrong_options_are_clear_errors(
    fast_cli: FastCli, model: list[str], arguments: tuple[str, ...], words: str
) -> None:
    done = fast_cli("run", "bash", *model, *arguments)
    assert done.code == 2 and words in done.err and "Traceback" not in done.err


def test_two_runs_are_compared(cli: Cli, tmp_path: Path, model: list[str]) -> None:
    for name in ("a", "b"):
        assert cli("run", "bash", *model, *SMALL, "--out", name).returncode == 0
    results = list(read_results(tmp_path / "b"))
    worse = [one.model_copy(update={"reward": 0.0}) for one in results]
    (tmp_path / "worse.jsonl").write_text("".join(one.model_dump_json() + "\n" for one in worse))
    done = cli("compare", "a", "worse.jsonl", "--json")
    compared = json.loads(done.stdout)
    assert (compared["wins"], compared["losses"], len(compared["tasks"])) == (0, 3, 3)
    table = cli("compare", "a", "worse.jsonl")
    assert "losses: 3" in table.stdout and "p = 0.25" in table.stdout
    unscored = [one.model_copy(update={"reward": None}) for one in results]
    (tmp_path / "unscored.jsonl").write_text("".join(one.model_dump_json() + "\n" for one in unscored))
    apart = cli("compare", "a", "unscored.jsonl")
    assert apart.returncode == 2 and "no scored task in common" in apart.stderr
