"""Converters with all kinds of episodes: lengths match, masked tokens have no loss, no failure is 0."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.types import JobState, Result
from prorl_envs.trainers.advantages import NothingScored, group_advantages, neutral_rewards, spread
from prorl_envs.trainers.atropos import as_scored_data
from prorl_envs.trainers.openrlhf import as_openrlhf
from prorl_envs.trainers.rows import SeveralRows, one_row, rows_of, training_reward
from prorl_envs.trainers.skyrl import as_skyrl
from prorl_envs.trainers.slime import as_slime, settle
from prorl_envs.trainers.tasks import from_text, to_text
from prorl_envs.trainers.trl import as_trl
from prorl_envs.trainers.trl_async import as_samples
from prorl_envs.trainers.verl import as_verl
from tests.trainers.made import groups, results

REWARDS = st.lists(st.none() | st.floats(min_value=-10, max_value=10), min_size=1, max_size=8)
SINGLE = st.lists(groups(3, most_rows=1), min_size=1, max_size=3)


def scored(group: list[Result]) -> bool:
    return any(training_reward(result) is not None for result in group)


@given(REWARDS)
def test_advantages_exclude_failures(rewards: list[float | None]) -> None:
    advantages = group_advantages(rewards)
    assert [a is None for a in advantages] == [r is None for r in rewards]
    known = [a for a in advantages if a is not None]
    assert math.isclose(sum(known), 0, abs_tol=1e-3)
    if spread(rewards) == 0:
        assert all(abs(a) < 1e-3 for a in known)


@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_neutral_rewards_do_not_change_the_mean(rewards: list[list[float | None]]) -> None:
    if not any(reward is not None for group in rewards for reward in group):
        with pytest.raises(NothingScored):
            neutral_rewards(rewards)
        return
    for before, after in zip(rewards, neutral_rewards(rewards), strict=True):
        known = [reward for reward in before if reward is not None]
        assert all(a == b for a, b in zip(after, before, strict=True) if b is not None)
        if known:
            assert math.isclose(sum(after) / len(after), sum(known) / len(known), abs_tol=1e-9)


@settings(max_examples=40)
@given(SINGLE)
def test_trl(groups: list[list[Result]]) -> None:
    results = [result for group in groups for result in group]
    if not scored(results):
        with pytest.raises(NothingScored):
            as_trl(results, 2)
        return
    output = as_trl(results, 2)
    assert {len(values) for values in output.values()} == {len(results)}
    for index, result in enumerate(results):
        row = one_row(result)
        ids, mask, logprobs = (output[key][index] for key in ("completion_ids", "env_mask", "logprobs"))
        assert output["prompt_ids"][index] and ids
        assert len(ids) == len(mask) == len(logprobs)
        assert mask == (row.mask if row.trains else [0])
        assert output["reward"][index] == training_reward(result)


@settings(max_examples=40)
@given(groups(4), st.integers(min_value=0, max_value=9))
def test_trl_async(group: list[Result], version: int) -> None:
    samples = as_samples(group, 7, version)
    rows = [row for result in group for row in rows_of(result) if row.trains]
    assert [sample["input_ids"] for sample in samples] == [row.prompt_ids + row.response_ids for row in rows]
    advantages = group_advantages([training_reward(result) for result in group])
    for sample, row in zip(samples, rows, strict=True):
        assert len(sample["input_ids"]) == len(sample["completion_mask"]) == len(sample["old_log_probs"])
        assert sample["advantage"] == advantages[row.repetition]
        assert sample["model_version"] == row.oldest_version
        assert all(
            bit or p == 0 for bit, p in zip(sample["completion_mask"], sample["old_log_probs"], strict=True)
        )


@settings(max_examples=40)
@given(results(), st.integers(min_value=1, max_value=12))
def test_verl(result: Result, room: int) -> None:
    outputs = as_verl(result, 100, room)
    assert len(outputs) == len(rows_of(result))
    for output in outputs:
        assert len(output["response_ids"]) == len(output["response_mask"]) == len(output["response_logprobs"])
        assert len(output["response_ids"]) <= room
        assert output["reward_score"] == result.reward
        assert set(output["extra_fields"]) == set(outputs[0]["extra_fields"])


@settings(max_examples=40)
@given(results(exact=True).filter(lambda result: any(row.prompt_ids for row in rows_of(result))))
def test_a_prompt_longer_than_verls_limit_is_refused(result: Result) -> None:
    with pytest.raises(InputError, match="max_prompt_length"):
        as_verl(result, 0, 100)


@settings(max_examples=40)
@given(st.lists(groups(2), min_size=1, max_size=3), st.booleans())
def test_skyrl(groups: list[list[Result]], step_wise: bool) -> None:
    results = [result for group in groups for result in group]
    ids = list(range(len(results)))
    if not scored(results):
        with pytest.raises(NothingScored):
            as_skyrl(groups, ids, 2, step_wise=step_wise)
        return
    if not step_wise and any(len(result.rows) > 1 for result in results):
        with pytest.raises(SeveralRows):
            as_skyrl(groups, ids, 2)
        return
    output = as_skyrl(groups, ids, 2, step_wise=step_wise)
    count = sum(len(rows_of(result)) for result in results) if step_wise else len(results)
    for key in (
        "prompt_token_ids",
        "response_ids",
        "rewards",
        "loss_masks",
        "rollout_logprobs",
        "trajectory_ids",
    ):
        assert len(output[key]) == count
    assert all(output["response_ids"]) and all(output["prompt_token_ids"])
    lengths = [
        [len(part) for part in output[key]] for key in ("response_ids", "loss_masks", "rollout_logprobs")
    ]
    assert lengths[0] == lengths[1] == lengths[2]
    assert sum(map(sum, output["loss_masks"])) == sum(sum(row.mask) for r in results for row in rows_of(r))
    if step_wise:
        lasts = [
            one for one, last in zip(output["trajectory_ids"], output["is_last_step"], strict=True) if last
        ]
        assert lasts == ids


@settings(max_examples=40)
@given(groups(3))
def test_slime(group: list[Result]) -> None:
    samples: list[list[Any]] = []
    for result in group:
        fields = as_slime(result, result.sample)
        assert {one["rollout_id"] for one in fields} == ({result.sample} if len(fields) > 1 else {None})
        for one in fields:
            assert len(one["loss_mask"]) == len(one["rollout_log_probs"]) == one["response_length"] > 0
            assert len(one["tokens"]) > one["response_length"]
            assert (one["reward"] is None) == (not any(one["loss_mask"]))
        samples.append([SimpleNamespace(**one, remove_sample=False) for one in fields])
    keep, reason = settle(samples)
    assert keep == (reason is None)
    for rows in samples if keep else []:
        for row in rows:
            assert row.reward is not None
            assert row.remove_sample == (not any(row.loss_mask))


@settings(max_examples=40)
@given(results(most_rows=1).filter(lambda result: result.reward is not None), st.booleans())
def test_openrlhf(result: Result, logprobs: bool) -> None:
    output = as_openrlhf(result, logprobs=logprobs)
    tokens, row = output["observation_tokens"], one_row(result)
    trained = [index for start, end in output["action_ranges"] for index in range(start, end)]
    mask = [0] * len(row.prompt_ids) + row.mask
    assert trained == [index for index, bit in enumerate(mask) if bit]
    assert (output["rollout_log_probs"] is not None) == logprobs
    if logprobs:
        assert len(output["rollout_log_probs"]) == len(tokens)


@settings(max_examples=40)
@given(groups(4, most_rows=1))
def test_atropos(group: list[Result]) -> None:
    data = as_scored_data(group)
    rows = [row for row in map(one_row, group) if row.trains]
    if data is None:
        assert spread([row.reward for row in rows]) == 0
        return
    assert data["scores"] == [row.reward for row in rows]
    assert all(result.state is JobState.DONE for result in group if result.reward in data["scores"])
    for tokens, mask, logprobs, row in zip(
        data["tokens"], data["masks"], data["inference_logprobs"], rows, strict=True
    ):
        assert len(tokens) == len(mask) == len(logprobs)
        bits = [0] * len(row.prompt_ids) + row.mask
        assert mask == [token if bit else -100 for token, bit in zip(tokens, bits, strict=True)]
        assert all(p == 1.0 for p, bit in zip(logprobs, bits, strict=True) if not bit)


def masked_group() -> list[Result]:
    """Return a group with the rewards 1, 0, 0 and 1; the first and the last sample have no exact tokens."""
    results_in_order = []
    for sample, (reward, exact) in enumerate([(1.0, False), (0.0, True), (0.0, True), (1.0, False)]):
        found = find(
            results(sample=sample, most_rows=1, exact=exact),
            lambda result: (
                result.reward is not None and any(turn.end > turn.start for turn in result.rows[0].turns)
            ),
        )
        results_in_order.append(found.model_copy(update={"reward": reward}))
    return results_in_order


def test_rewards_of_masked_samples_do_not_count() -> None:
    """All that is trained on has the reward 0, so nothing is pushed up or down."""
    group = masked_group()
    assert [result.mask_sample for result in group] == [True, False, False, True]
    assert [sample["advantage"] for sample in as_samples(group, 7, 0)] == [0.0, 0.0]
    assert {sample["metrics"]["reward_std"] for sample in as_samples(group, 7, 0)} == {0.0}
    assert as_trl(group, 2)["reward"] == [None, 0.0, 0.0, None]
    assert as_skyrl([group], None, 2)["rewards"] == [0.0] * 4
    assert as_scored_data(group) is None
    samples = [[SimpleNamespace(**one) for one in as_slime(result, result.sample)] for result in group]
    assert settle(samples) == (False, "equal_rewards")


def test_an_episode_trains_if_one_of_its_rows_does() -> None:
    """Its reward counts, also if its last row has no sampled token."""
    first = find(
        results(sample=0, most_rows=2, exact=True),
        lambda result: [row.trains for row in rows_of(result)] == [True, False],
    ).model_copy(update={"reward": 1.0})
    second = masked_group()[1]
    samples = [[SimpleNamespace(**one) for one in as_slime(result, 0)] for result in (first, second)]
    assert settle(samples) == (True, None)
    assert [row.reward for row in samples[0]] == [1.0, 1.0]


def test_a_task_row_survives_a_data_set() -> None:
    row = {"id": "ä", "setup": {"files": [1, None, 2.5]}}
    assert from_text(to_text(row)) == row
    for wrong in ("[]", "no json", None, 3, "[" * 100_000):
        with pytest.raises(InputError):
            from_text(wrong)
