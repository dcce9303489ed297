"""Results as rows: no sampled token is lost, and no excluded token is trained on."""

import itertools

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from prorl_envs.rollout.api.types import JobState, Result, Trajectory
from prorl_envs.trainers.rows import Row, RowStatus, SeveralRows, one_row, rows_of
from tests.trainers.made import results


@settings(max_examples=40)
@given(results())
def test_a_row_is_the_ledger_up_to_the_last_sampled_token(result: Result) -> None:
    rows = rows_of(result)
    assert [row.index for row in rows] == list(range(len(rows)))
    assert [row.last for row in rows] == [False] * (len(rows) - 1) + [True]
    assert sum(row.weight for row in rows) == pytest.approx(1.0)
    assert {row.reward for row in rows} == {result.reward}
    for row, trajectory in zip(rows, result.rows, strict=False):
        whole = row.prompt_ids + row.response_ids
        assert whole == trajectory.ids[: len(whole)]
        assert not any(trajectory.loss_mask[len(whole) :])
        assert len(row.response_ids) == len(row.mask) == len(row.logprobs)
        assert not any(trajectory.loss_mask[: len(row.prompt_ids)])
        for logprob, bit in zip(row.logprobs, row.mask, strict=True):
            assert bit or logprob == 0.0


@settings(max_examples=40)
@given(results())
def test_the_mask_is_the_sampled_tokens_of_episodes_that_count(result: Result) -> None:
    for row, trajectory in zip(rows_of(result), result.rows, strict=False):
        first = len(row.prompt_ids)
        sampled = trajectory.loss_mask[first : first + len(row.mask)]
        counts = row.status in (RowStatus.COMPLETED, RowStatus.TRUNCATED)
        assert row.mask == (sampled if counts else [0] * len(sampled))
        assert counts == (not result.mask_sample)
        if counts:
            assert row.logprobs == trajectory.logprobs[first : first + len(row.mask)]


@settings(max_examples=40)
@given(results(exact=True))
def test_versions_cover_every_sampled_token_and_no_other(result: Result) -> None:
    for row, trajectory in zip(rows_of(result), result.rows, strict=False):
        covered = [0] * len(row.response_ids)
        for span in row.versions:
            assert span.start < span.end
            for index in range(span.start, span.end):
                covered[index] += 1
        first = len(row.prompt_ids)
        assert covered == trajectory.loss_mask[first : first + len(covered)]
        for one, other in itertools.pairwise(row.versions):
            assert one.end <= other.start
            assert one.version != other.version or one.end < other.start
        if row.versions:
            assert row.oldest_version == min(int(span.version) for span in row.versions)
            assert row.staleness(7) == 7 - row.oldest_version


@settings(max_examples=40)
@given(results(), st.lists(st.integers(), min_size=1))
def test_a_filled_row_has_a_prompt_and_a_response(result: Result, prompt: list[int]) -> None:
    for row in rows_of(result):
        full = row.filled(prompt, 9)
        assert full.prompt_ids and full.response_ids
        assert len(full.response_ids) == len(full.mask) == len(full.logprobs)
        assert full.trains == row.trains
        assert full.reward == row.reward
        if row.trains:
            assert full is row
        else:
            assert full.response_ids == [9]


@settings(max_examples=40)
@given(results())
def test_only_a_graded_episode_trains(result: Result) -> None:
    row = rows_of(result)[-1]
    if row.trains:
        assert result.state is JobState.DONE and result.reward is not None
    if result.state is JobState.CANCELLED:
        assert (row.status, row.reward) == (RowStatus.ABORTED, None)
    if result.state is JobState.FAILED:
        assert (row.status, row.reward, row.failure) == (RowStatus.FAILED, None, "sandbox")


@settings(max_examples=40)
@given(results())
def test_one_row_or_a_clear_refusal(result: Result) -> None:
    if len(result.rows) > 1:
        with pytest.raises(SeveralRows, match=r"reasoning to keep"):
            one_row(result)
    else:
        assert isinstance(one_row(result), Row)


def test_a_row_ends_at_its_last_sampled_token() -> None:
    """The policy does not answer the last observation, so no loss depends on it."""
    good = find(results(exact=True, most_rows=1), lambda result: rows_of(result)[0].trains)
    assert good.trajectory is not None
    turn = good.trajectory.turns[0].model_copy(update={"version_spans": []})
    trajectory = Trajectory(
        ids=[1, 2, 3, 4, 5, 6, 7, 8, 9],
        loss_mask=[0, 0, 1, 1, 0, 0, 1, 0, 0],
        logprobs=[0.0, 0.0, -0.3, -0.4, 0.0, 0.0, -0.7, 0.0, 0.0],
        turns=[turn.model_copy(update={"start": start, "end": end}) for start, end in ((2, 4), (6, 7))],
    )
    (row,) = rows_of(good.model_copy(update={"trajectory": trajectory}))
    assert row.prompt_ids == [1, 2] and row.response_ids == [3, 4, 5, 6, 7]
    assert row.mask == [1, 1, 0, 0, 1] and row.logprobs == [-0.3, -0.4, 0.0, 0.0, -0.7]
    assert row.turns == ((0, 2), (4, 5))


def test_ids_that_differ_from_the_sent_ones_are_rejected() -> None:
    good = find(results(exact=True, most_rows=1), lambda result: rows_of(result)[0].trains)
    assert good.trajectory is not None
    drifted = good.model_copy(update={"trajectory": good.trajectory.model_copy(update={"drift": 1})})
    assert rows_of(drifted)[0].status is RowStatus.REJECTED
    assert not rows_of(drifted)[0].trains
