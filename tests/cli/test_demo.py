"""A small demo as a user runs it, with a real service, real sandboxes and a scripted model."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from prorl_envs.catalog import Catalog
from prorl_envs.cli.commands.demo import Chosen, DemoOptions, choose, script, unexpected
from prorl_envs.config import Settings
from prorl_envs.errors import FailureKind
from prorl_envs.rollout.api.types import GroupStatistics, JobState
from prorl_envs.rollout.client.result_files import read_results
from prorl_envs.testing.scripted import Mix
from tests.cli.conftest import Cli

SMALL = ("demo", "--swebench", "0", "--tasks", "2", "--out", "runs")


@pytest.mark.thorough  # CI runs `make demo`, which checks the same
def test_every_group_has_its_scripted_outcome(cli: Cli, tmp_path: Path) -> None:
    done = cli(*SMALL)
    assert done.returncode == 0, done.stderr
    assert "summary of the model scripted" in done.stdout
    assert "4 of 4 groups are informative" in done.stdout
    assert "The rewards of every group are those of the script." in done.stdout
    assert len(done.stdout.splitlines()) < 30
    page = Path(unquote(urlsplit(re.findall(r"file:\S+", done.stdout)[0]).path))
    assert page.samefile(tmp_path / "runs" / "episodes.html") and b"demo/bash/greeting/0" in page.read_bytes()
    assert "model server:    http://127.0.0.1:" in done.stderr
    assert "rollout service: http://127.0.0.1:" in done.stderr
    results = list(read_results(tmp_path / "runs" / "results.jsonl"))
    assert len(results) == 4 * 6
    for result in results:
        assert (result.reward is None) == (result.failure is not None) == result.mask_sample
        assert result.trajectory is not None and result.trajectory.drift == 0
        assert len(result.trajectory.ids) == len(result.trajectory.loss_mask)
        assert len(result.trajectory.ids) == len(result.trajectory.logprobs)
    failed = [result for result in results if result.failure]
    assert {r.failure.kind for r in failed if r.failure} == {FailureKind.MODEL}
    assert all(r.state is JobState.FAILED and r.attempts == 2 for r in failed)


@pytest.mark.thorough
def test_a_solver_alone_gives_uninformative_groups(cli: Cli) -> None:
    done = cli(*SMALL, "--mix", "solve=1", "--samples", "2")
    assert done.returncode == 0, done.stderr
    assert "1.000" in done.stdout and "0 of 4 groups are informative" in done.stdout


def test_a_wrong_mix_is_a_clear_error(cli: Cli) -> None:
    done = cli(*SMALL, "--mix", "cheat=1")
    assert done.returncode == 2
    assert "'cheat=1' is not part of a mix" in done.stderr and "solve" in done.stderr


def test_an_absent_model_server_is_a_clear_error(cli: Cli) -> None:
    done = cli(*SMALL, "--llm", "http://127.0.0.1:9/v1")
    assert done.returncode == 2
    assert "127.0.0.1:9" in done.stderr and "hint:" in done.stderr


def test_tasks_that_need_isolation_are_left_out_without_it(cli: Cli, tmp_path: Path) -> None:
    done = cli("--driver", "local", "demo", "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and "can run none of the demo's tasks" in done.stderr
    assert "and 9 more: bash tasks need isolated sandboxes" in done.stderr.replace("\n", " ")
    done = cli(
        "--driver", "local", "run", "bash", "--llm", "http://127.0.0.1:1", "--out", str(tmp_path / "out")
    )
    assert done.returncode == 2 and "bash tasks need isolated sandboxes" in done.stderr
    assert cli("--driver", "local", "tasks", "math").stderr.strip() == "12 of 12 tasks"


def test_an_unexpected_reward_is_reported() -> None:
    options = DemoOptions(mix=Mix.parse("solve=1,wrong=1,error500=1"))

    def group(*rewards: float | None) -> GroupStatistics:
        return GroupStatistics(
            group_id="g", task_id="t", environment="bash", rewards=list(rewards),
            mean=None, std=None, informative=True, failures={},
        )  # fmt: skip

    assert unexpected([group(0.0, 1.0, None)], options) == []
    assert len(unexpected([group(0.0, 1.0, 0.0), group(None, 1.0, 0.0)], options)) == 1


@pytest.fixture(scope="module")
def examples() -> list[Chosen]:
    return choose(Catalog.of(Settings()), DemoOptions(families=("bash", "ipython")))


def test_the_script_identifies_every_task_by_its_instruction(examples: list[Chosen]) -> None:
    book = script(examples)
    for one in examples:
        assert one.task.reference, f"{one.task.id} has no reference solution"
        assert book.find(f"before\n{one.task.instruction}\nafter") == one.task.instruction
