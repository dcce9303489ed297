"""Effects of an ablation, with a service over real HTTP and a real tokenizer."""

import random
from pathlib import Path
from typing import Any

import pytest

from learn.ahead import AheadRollouts
from learn.drift import retokenised, split
from learn.plan import load_plan
from prorl_envs.errors import InputError
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.types import JobState
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.trainers.asking import connect_sync
from prorl_envs.trainers.trl import prompts
from tests.trainers.conftest import ToyService, task, trl_trainer

TINY = Path(__file__).parents[2] / "learn" / "tiny.yaml"
RENDERER = builtin_renderer()


def rollouts(*answers: list[int]) -> dict[str, list[Any]]:
    """Make a rollout: an observation follows each answer."""
    prompt = RENDERER.prompt([{"role": "user", "content": "Look."}])
    between = RENDERER.tokenizer.encode("\n<|im_start|>tool\nfile<|im_end|>\n<|im_start|>assistant\n").ids
    ids: list[int] = []
    mask: list[int] = []
    for answer in answers:
        ids += [*(between if ids else ()), *answer]
        mask += [*([0] * len(between) if mask else ()), *([1] * len(answer))]
    return {
        "prompt_ids": [prompt],
        "completion_ids": [ids],
        "env_mask": [mask],
        "logprobs": [[-0.5 * bit for bit in mask]],
        "reward": [1.0],
    }


def encoded(text: str) -> list[int]:
    return RENDERER.tokenizer.encode(text).ids


def test_text_tokenised_by_the_tokenizer_is_unchanged() -> None:
    output = rollouts(encoded("the file<|im_end|>"), encoded("done.<|im_end|>"))
    again, counts = retokenised(output, RENDERER.tokenizer)
    assert counts == {"drift": 0.0, "drifted": 0.0}
    for key in ("prompt_ids", "completion_ids", "env_mask", "reward"):
        assert again[key] == output[key]
    assert not any(again["logprobs"][0])


def test_an_answer_sampled_in_other_tokens_drifts_and_is_counted() -> None:
    letters = [number for letter in "the file" for number in encoded(letter)]
    usual = encoded("the file")
    assert len(letters) > len(usual)
    [end] = encoded("<|im_end|>")
    output = rollouts([*letters, end], [*usual, end])
    again, counts = retokenised(output, RENDERER.tokenizer)
    assert again["prompt_ids"] == output["prompt_ids"]
    assert RENDERER.decode(again["completion_ids"][0]) == RENDERER.decode(output["completion_ids"][0])
    assert sum(again["env_mask"][0]) == 2 * (len(usual) + 1)
    assert counts["drifted"] == 1.0 and 0 < counts["drift"] <= 1


def test_tokens_split_in_two_are_the_same_text_and_drift() -> None:
    usual = encoded("<tool_call>the file of the folder</tool_call><|im_end|>")
    for share, longer in ((0.0, False), (1.0, True)):
        shown = split(usual, RENDERER.tokenizer, share, random.Random(0))
        assert RENDERER.decode(shown) == RENDERER.decode(usual)
        assert (len(shown) > len(usual)) == longer
        _, counts = retokenised(rollouts(shown), RENDERER.tokenizer)
        assert counts["drifted"] == float(longer)


def ahead(toy: ToyService, staleness: int, uploads: list[int]) -> AheadRollouts:
    return AheadRollouts(
        toy.url,
        "toy",
        [task(name) for name in "abcdef"],
        step=2,
        samples=2,
        staleness=staleness,
        weights=lambda _, version: uploads.append(version),
        sampling=Sampling(max_tokens=256),
    )


def of_step(*names: str) -> list[str]:
    return [row["prompt"] for row in prompts(task(name) for name in names) for _ in range(2)]


@pytest.mark.parametrize("staleness", [0, 1])
def test_rollouts_have_exactly_the_requested_staleness(toy: ToyService, staleness: int) -> None:
    uploads: list[int] = []
    rollouts = ahead(toy, staleness, uploads)
    seen = []
    try:
        for step, names in enumerate(("ab", "cd", "ef")):
            output = rollouts(of_step(*names), trl_trainer(step))
            assert sorted(output["reward"]) == [0.0, 0.0, 1.0, 1.0]
            assert [job.split("/")[-2] for job in output["job_id"]] == [
                str(2 * step + index) for index in (0, 0, 1, 1)
            ]
            seen.append({step - int(version) for version in output["weight_version"]})
            with connect_sync(toy.url) as client:  # requests_made_ahead_have_time_to_finish
                list(client.follow([group.id for asked, _ in rollouts._asked.values() for group in asked]))
    finally:
        rollouts.close()
    assert seen == [{0}, {staleness}, {staleness}]
    assert uploads == [0, 1, 2]


def test_requests_ahead_of_the_last_step_are_cancelled(toy: ToyService) -> None:
    rollouts = ahead(toy, 1, [])
    rollouts(of_step("a", "b"), trl_trainer(0))
    toy.close_gate("eval")
    rollouts._ask(4)
    toy.until_entered("eval", 4)
    rollouts.close()
    toy.until_empty()
    with connect_sync(toy.url) as client:
        states = [result.state for result in client.page().results if "/4/" in result.job_id]
    assert states == [JobState.CANCELLED] * 2


def test_every_variant_has_a_unique_name() -> None:
    plan = load_plan(TINY)
    assert plan.arm == "trained" and plan.changed({"steps": 3}).steps == 3
    assert plan.changed({"dynamic": True}).arm == "dynamic"
    assert plan.changed({"staleness": 2, "retokenise": True}).arm == "stale2-retokenised"
    arms = [plan.changed(other).arm for other in plan.ablations]
    assert arms == ["stale2", "dynamic"]
    with pytest.raises(InputError, match="synchronous"):
        plan.changed({"staleness": 2, "dynamic": True})
