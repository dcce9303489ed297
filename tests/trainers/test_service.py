"""Adapters with a service over real HTTP, without the trainers' packages."""

import asyncio
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.errors import Unavailable
from prorl_envs.rollout.api.types import AgentLimits, JobState
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.trainers.advantages import NothingScored
from prorl_envs.trainers.asking import GroupTemplate, collect, connect_sync
from prorl_envs.trainers.rollouts import CHECK_S, EpisodeFailed, Rollouts, close_shared
from prorl_envs.trainers.skyrl import RolloutGenerator, rows
from prorl_envs.trainers.slime import episode
from prorl_envs.trainers.tasks import from_text
from prorl_envs.trainers.trl import TrlRollouts, prompts, service_reward
from prorl_envs.trainers.weights import WeightUpdateFailed, weights_change, weights_change_sync
from tests.trainers.conftest import ToyService, task, toy_service, trl_trainer

pytestmark = pytest.mark.anyio
EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"


def repeated(*names: str, samples: int) -> list[str]:
    return [row["prompt"] for row in prompts(task(name) for name in names) for _ in range(samples)]


def test_trl_gets_an_episode_for_each_prompt_and_new_weights_before_each_step(toy: ToyService) -> None:
    uploads: list[int] = []

    def upload(trainer: Any, version: int) -> None:
        assert toy.server.counts.running == 0
        uploads.append(version)

    rollouts = TrlRollouts(toy.url, "toy", weights=upload)
    try:
        for step in (0, 0, 1):
            output = rollouts(repeated("a", "b", samples=2), trl_trainer(step))
            assert sorted(output["reward"]) == [0.0, 0.0, 1.0, 1.0]
            assert service_reward(reward=output["reward"]) == output["reward"]
            assert output["weight_version"] == [str(step)] * 4
            for ids, mask in zip(output["completion_ids"], output["env_mask"], strict=True):
                assert len(ids) == len(mask) and 0 in mask and 1 in mask
    finally:
        rollouts.close()
    assert uploads == [0, 1]


def test_a_failed_sample_has_no_reward_and_no_loss() -> None:
    with toy_service("solve=1,error500=1") as toy:
        rollouts = TrlRollouts(toy.url, "toy")
        try:
            output = rollouts(repeated("a", samples=2), trl_trainer())
        finally:
            rollouts.close()
    assert sorted(map(str, output["reward"])) == ["1.0", "None"]
    failed = output["reward"].index(None)
    assert output["env_mask"][failed] == [0] and output["completion_ids"][failed] == [2]
    assert output["status"][failed] == "failed"
    assert output["prompt_ids"][failed] == output["prompt_ids"][1 - failed]


def test_groups_without_a_gradient_are_replaced_from_the_reserve() -> None:
    """One task of the prompts is always solved; the reserve has informative ones."""
    reserve = iter([task("c", instruction="Know c."), *(task(name) for name in "defgh")])
    with toy_service("solve=1,wrong=1") as toy:
        rollouts = TrlRollouts(toy.url, "toy", reserve=reserve)
        given = [task("a"), task("b", instruction="Know b.")]
        asked = [row["prompt"] for row in prompts(given) for _ in range(4)]
        try:
            output = rollouts(asked, trl_trainer(samples=4))
            with pytest.raises(InputError, match="groups of a batch differ"):
                rollouts(asked[:7], trl_trainer(samples=4))
            filled = rollouts(asked[4:] * 2, trl_trainer(samples=4))  # and the reserve is empty
            toy.until_read()  # also those of the groups that were replaced
        finally:
            rollouts.close()
    groups = [output["reward"][:4], output["reward"][4:]]
    assert all(len(set(rewards)) == 2 for rewards in groups)
    assert len({job.rpartition("/")[0] for job in output["job_id"]}) == 2
    assert filled["reward"] == [1.0] * 8


def test_a_step_without_any_reward_is_an_error() -> None:
    with toy_service("error500=1") as toy:
        rollouts = TrlRollouts(toy.url, "toy")
        try:
            with pytest.raises(NothingScored, match="model: 2"):
                rollouts(repeated("a", samples=2), trl_trainer())
        finally:
            rollouts.close()


def test_jobs_of_an_interrupted_trainer_are_cancelled(toy: ToyService) -> None:
    """The trainer is interrupted while its episodes run."""
    toy.close_gate("eval")
    asking = GroupTemplate(toy.url, "toy")

    class Interrupt(Exception):
        pass

    with connect_sync(toy.url) as client:
        follow = client.follow

        def interrupted(*args: Any) -> Any:
            toy.until_entered("eval", 4)
            raise Interrupt

        client.follow = interrupted  # type: ignore[method-assign, assignment]
        with pytest.raises(Interrupt):
            collect(client, [asking.group("g", task(), 4)])
        results = list(follow([f"{asking.run}/g"]))
    assert {result.state for result in results} == {JobState.CANCELLED}
    toy.until_empty()


async def test_an_evicted_group_is_cancelled_at_the_service() -> None:
    with toy_service() as toy:
        toy.close_gate("eval")
        asking = GroupTemplate(toy.url, "toy")
        async with Rollouts(toy.url) as rollouts:
            group = asyncio.create_task(rollouts.group(asking.group("g", task(), 3)))
            await asyncio.to_thread(toy.until_entered, "eval", 3)
            group.cancel()
            await asyncio.wait([group])
        async with RolloutClient(toy.url) as client:
            states = {job.state for job in (await client.group(f"{asking.run}/g")).jobs}
        await asyncio.to_thread(toy.until_empty)
    assert states == {JobState.CANCELLED}


async def test_a_kept_group_continues_and_is_not_run_again() -> None:
    with toy_service() as toy:
        toy.close_gate("eval")
        request = GroupTemplate(toy.url, "toy").group("g", task(), 2)
        async with Rollouts(toy.url) as rollouts:
            group = asyncio.create_task(rollouts.group(request, keep=True))
            await asyncio.to_thread(toy.until_entered, "eval", 2)
            group.cancel()
            await asyncio.wait([group])
            await rollouts.settle()
            toy.open_gate("eval")
            results = await rollouts.group(request)
            async with asyncio.timeout(CHECK_S / 2):
                assert await rollouts.group(request) == results
        assert {result.state for result in results} == {JobState.DONE}
        assert sum(count for (_, step), count in toy.world.entered.items() if step == "eval") == 2
        await asyncio.to_thread(toy.until_read)


async def test_a_group_that_takes_too_long_is_reported_in_its_results() -> None:
    with toy_service() as toy:
        toy.close_gate("eval")
        async with Rollouts(toy.url) as rollouts:
            request = GroupTemplate(toy.url, "toy").group("g", task(), 2)
            results = await rollouts.group(request, timeout_s=0.05)
    assert {result.state for result in results} == {JobState.CANCELLED}


async def test_a_failed_episode_is_requested_again() -> None:
    with toy_service("error500=1,solve=1") as toy:
        async with Rollouts(toy.url) as rollouts:
            asking = GroupTemplate(toy.url, "toy")
            results = [await rollouts.episode(asking, f"e{n}", task(), attempts=4) for n in range(4)]
    assert {result.reward for result in results} == {1.0}


async def test_an_episode_that_keeps_failing_is_an_error_not_a_zero() -> None:
    with toy_service("error500=1") as toy:
        async with Rollouts(toy.url) as rollouts:
            with pytest.raises(EpisodeFailed, match="has no reward: model"):
                await rollouts.episode(GroupTemplate(toy.url, "toy"), "e", task(), attempts=2)


async def test_an_episode_without_tokens_to_train_on_is_an_error() -> None:
    """verl requests single episodes, so this one has no group whose mean could replace its reward."""
    limits = AgentLimits(max_tokens=16)
    with toy_service() as toy:
        async with Rollouts(toy.url) as rollouts:
            with pytest.raises(EpisodeFailed, match="e/1/0 has no tokens to train on"):
                await rollouts.episode(GroupTemplate(toy.url, "toy", limits=limits), "e", task(), attempts=2)


async def test_an_unreachable_service_is_reported_within_the_patience() -> None:
    async with Rollouts("http://127.0.0.1:9", patience_s=0.1) as rollouts:
        with pytest.raises(Unavailable, match="does not answer"):
            await rollouts.group(GroupTemplate("", "toy").group("g", task(), 1))


async def test_weights_change_while_no_turn_is_sampled() -> None:
    with toy_service() as toy:
        async with RolloutClient(toy.url) as client:
            async with weights_change(client, 3):
                view = await client.pause_model_servers()
                assert view.paused and view.in_flight == 0
            [server] = await client.model_servers()
            assert server.weight_version == "3"
            assert not (await client.resume_model_servers()).paused


async def test_a_failed_update_keeps_the_turns_held() -> None:
    with toy_service() as toy:
        async with RolloutClient(toy.url) as client:
            with pytest.raises(OSError, match="disk"):
                async with weights_change(client, 1):
                    raise OSError("the disk is full")
            router = (await client.status()).router
            assert router is not None and router.paused
            async with weights_change(client, 1):  # repeated, it succeeds
                pass
            router = (await client.status()).router
            assert router is not None and not router.paused


def test_weights_are_not_changed_if_turns_do_not_stop() -> None:
    with toy_service("hang=1") as toy, connect_sync(toy.url) as client:
        asking = GroupTemplate(toy.url, "toy")
        client.submit([asking.group("g", task(), 1)])
        toy.wait(toy.server.until(lambda counts: counts.running == 1))
        with (
            pytest.raises(WeightUpdateFailed, match="1 turns are still in flight"),
            weights_change_sync(client, 1, timeout_s=0),
        ):
            raise AssertionError("the weights must not be touched")
        router = client.status().router
        assert router is not None and not router.paused
        client.cancel_group(f"{asking.run}/g")


async def test_skyrl_generates_whole_batches() -> None:
    with toy_service() as toy:
        made = rows([task("a"), task("b")], environment="toy")
        batch: dict[str, Any] = {
            "prompts": [row["prompt"] for row in made for _ in range(2)],
            "env_extras": [{"task": row["task"]} for row in made for _ in range(2)],
            "trajectory_ids": [
                SimpleNamespace(instance_id=str(i // 2), repetition_id=i % 2) for i in range(4)
            ],
            "sampling_params": {"temperature": 1.0, "max_generate_length": 64},
        }
        generator = RolloutGenerator(toy.url, "toy", end_token=2)
        try:
            output = await generator.generate(batch)
            assert sorted(output["rewards"]) == [0.0, 0.0, 1.0, 1.0]
            assert output["rollout_metrics"]["rollouts/mean_completed"] == 1.0
            with pytest.raises(InputError, match="no column"):
                await generator.generate(batch | {"env_extras": [{}] * 4})
            toy.close_gate("eval")
            extras = [*batch["env_extras"][:2], *[{"task": '{"id": 7}'}] * 2]
            with pytest.raises(InputError, match="toy task"):  # and the good group does not keep running
                await generator.generate(batch | {"env_extras": extras})
        finally:
            await close_shared()
        await asyncio.to_thread(toy.until_empty)


async def test_slime_cancels_its_episode_when_its_batch_is_complete() -> None:
    class Sample(SimpleNamespace):
        Status = str

    with toy_service() as toy:
        toy.close_gate("eval")
        args = SimpleNamespace(prorl_url=toy.url, prorl_environment="toy")
        sample = Sample(metadata={"task": task()}, status="pending", index=0)
        try:
            assert (await episode(args, sample, {}, lambda: True)).status == "aborted"
        finally:
            await close_shared()
        await asyncio.to_thread(toy.until_empty)


def test_the_plain_loop_trains_step_after_step(
    toy: ToyService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(EXAMPLES / "client" / "loop.py"))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(task(str(number))) + "\n" for number in range(4)))
    options = ["--service", toy.url, "--environment", "toy", "--tasks", str(tasks)]
    example["main"]([*options, "--steps", "3", "--groups", "2", "--samples", "2"])
    said = capsys.readouterr().out
    assert said.count("4 rows") == 3 and "at most 2" not in said
    toy.until_empty()


@pytest.mark.parametrize(
    ("trainer", "column"),
    [("verl", "extra_info"), ("slime", "metadata"), ("openrlhf", "task"), ("skyrl", "task")],
)
def test_data_sets_carry_the_task(
    trainer: str, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, output = tmp_path / "tasks.jsonl", tmp_path / "out.jsonl"
    tasks.write_text(json.dumps(task("a")) + "\n")
    monkeypatch.setattr("sys.argv", ["make_data.py", trainer, str(tasks), str(output)])
    runpy.run_path(str(EXAMPLES / "make_data.py"), run_name="__main__")
    row = json.loads(output.read_text())
    carried = row[column]["task"] if isinstance(row[column], dict) else row[column]
    assert from_text(carried) == task("a")
