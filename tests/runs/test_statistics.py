"""Statistics of a run, and the comparison of two runs, checked with numbers calculated by hand."""

import math
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.rollout.api.summary import Summary
from prorl_envs.runs.statistics import (
    by_environment,
    clustered_error,
    compare,
    pass_at_k,
    sign_test,
    statistics_of,
)


def sample(task: str, reward: float | None, environment: str = "bash", **changes: object) -> Summary:
    fields: dict[str, object] = {
        "job_id": f"g/{task}/0", "group_id": f"g/{task}", "sample": 0, "environment": environment,
        "task_id": task, "state": "done" if reward is not None else "failed", "reward": reward,
        "failure": None if reward is not None else "model", "turns": 2, "tokens": 10, "sampled": 4,
    }  # fmt: skip
    return Summary(**(fields | changes))  # type: ignore[arg-type]


def test_a_failure_is_not_a_reward_of_zero() -> None:
    found = statistics_of([sample("a", 1.0), sample("a", None), sample("b", 0.0), sample("c", None)])
    assert (found.tasks, found.results, found.scored, found.mean_reward) == (3, 4, 2, 0.5)
    assert found.failures == {"model": 2} and found.pass_at == {1: 0.5}
    assert (found.turns, found.tokens, found.sampled_tokens) == (2.0, 40, 16)


def test_no_results_have_no_mean() -> None:
    found = statistics_of([])
    assert (found.mean_reward, found.standard_error, found.pass_at, found.turns) == (None, None, {}, 0.0)


def test_statistics_of_environments_are_separate() -> None:
    found = by_environment([sample("a", 1.0), sample("a", 0.0, "math"), sample("b", 1.0)])
    assert {name: one.mean_reward for name, one in found.items()} == {"bash": 1.0, "math": 0.0}


def test_standard_error_of_single_samples_is_the_usual_one() -> None:
    values = [0.0, 1.0, 1.0, 0.5]
    mean = sum(values) / 4
    usual = math.sqrt(sum((value - mean) ** 2 for value in values) / 3) / 2
    assert clustered_error([[value] for value in values], mean) == pytest.approx(usual)


def test_samples_of_one_task_are_not_independent() -> None:
    """Ten samples with the same reward give no more information about a task than one sample."""
    once = clustered_error([[0.0], [1.0]], 0.5)
    tenfold = clustered_error([[0.0] * 10, [1.0] * 10], 0.5)
    assert once == pytest.approx(tenfold) == pytest.approx(0.5)
    assert clustered_error([[1.0, 0.0]], 0.5) is None


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_counts_the_draws_with_a_solution(numbers: tuple[int, int, int]) -> None:
    samples, solved, k = numbers
    draws = list(combinations([True] * solved + [False] * (samples - solved), k))
    assert pass_at_k(samples, solved, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_leaves_out_tasks_with_too_few_samples() -> None:
    rewards = [sample("a", 1.0), sample("a", 0.0), sample("a", 0.0), sample("b", 1.0)]
    assert statistics_of(rewards).pass_at == pytest.approx({1: (1 / 3 + 1) / 2, 2: 2 / 3, 3: 1.0})


def test_a_partial_reward_solves_nothing() -> None:
    assert statistics_of([sample("a", 0.99)]).pass_at == {1: 0.0}


@given(st.integers(0, 12), st.integers(0, 12))
def test_sign_test_adds_up_the_tails(wins: int, losses: int) -> None:
    trials = wins + losses
    chances = [Fraction(math.comb(trials, n), 2**trials) for n in range(trials + 1)]
    expected = sum(chance for n, chance in enumerate(chances) if chance <= chances[wins])
    assert sign_test(wins, losses) == pytest.approx(float(expected))


def test_two_runs_are_compared_by_task() -> None:
    before = [sample("a", 0.0), sample("a", 1.0), sample("b", 1.0), sample("c", 1.0), sample("d", None)]
    after = [sample("a", 1.0), sample("b", 0.0), sample("c", 1.0), sample("e", 1.0), sample("f", 1.0)]
    found = compare(before, after)
    assert [(one.task_id, one.change) for one in found.tasks] == [("a", 0.5), ("b", -1.0), ("c", 0.0)]
    assert (found.wins, found.losses, found.ties, found.p_value) == (1, 1, 1, 1.0)
    assert (found.only_before, found.only_after) == (0, 2)
    assert (found.mean_before, found.mean_after) == pytest.approx((2.5 / 3, 2 / 3))
    changes = [0.5, -1.0, 0.0]
    mean = sum(changes) / 3
    error = math.sqrt(sum((change - mean) ** 2 for change in changes) / 2 / 3)
    assert found.standard_error == pytest.approx(error)


def test_tasks_of_the_same_name_in_two_environments_are_two_tasks() -> None:
    found = compare([sample("a", 0.0), sample("a", 0.0, "math")], [sample("a", 1.0)])
    assert [(one.environment, one.task_id) for one in found.tasks] == [("bash", "a")]
    assert found.only_before == 1
