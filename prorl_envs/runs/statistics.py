"""Statistics of a run's results, and the comparison of two runs. Pure functions of result summaries."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from prorl_envs.rollout.api.summary import Summary
from prorl_envs.rollout.api.types import WireModel

#: A sample with at least this reward solved its task.
SOLVED = 1.0


class Statistics(WireModel):
    """Statistics of a set of results.

    Args:
        tasks: number of tasks that have a result.
        results: number of results; `scored`: number of results with a reward.
        mean_reward: mean of the rewards; None if there is none.
        standard_error: standard error of this mean, clustered by task; None with fewer than two tasks.
        pass_at: by k = 1, 2, 4, ... and the size of the largest group: the probability that at least one of k
            samples solves a task (reward 1 or more), as a mean over tasks with k or more scored samples.
        failures: number of results without a reward, by failure kind.
        turns: mean number of model calls per result.
        tokens, sampled_tokens: number of tokens in all trajectories, and of those that the model sampled.
    """

    tasks: int
    results: int
    scored: int
    mean_reward: float | None
    standard_error: float | None
    pass_at: dict[int, float]
    failures: dict[str, int]
    turns: float
    tokens: int
    sampled_tokens: int


class RunSummary(WireModel):
    """Content of `summary.json`.

    Args:
        environment, model, started: see `RunDescription`.
        expected: number of requested samples.
        wall_s: duration of the last session in seconds.
        sampled_tokens_per_s: sampled tokens of the results of the last session, per second.
        overall: statistics of all results; `environments`: statistics by environment.
    """

    environment: str
    model: str
    started: str
    expected: int
    wall_s: float
    sampled_tokens_per_s: float
    overall: Statistics
    environments: dict[str, Statistics]


class TaskComparison(WireModel):
    """Mean rewards of one task in two runs."""

    environment: str
    task_id: str
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


class Comparison(WireModel):
    """Comparison of two runs task by task.

    Args:
        tasks: tasks that have a reward in both runs.
        only_before, only_after: number of tasks that have a reward in only one of the runs.
        mean_before, mean_after: mean over `tasks` of their mean rewards; None without tasks.
        standard_error: standard error of the mean change per task; None with fewer than two tasks.
        wins, losses, ties: number of tasks with a higher, lower or equal mean reward in the second run.
        p_value: p-value of the two-sided sign test of wins against losses.
    """

    tasks: list[TaskComparison]
    only_before: int
    only_after: int
    mean_before: float | None
    mean_after: float | None
    standard_error: float | None
    wins: int
    losses: int
    ties: int
    p_value: float


def statistics_of(summaries: Iterable[Summary]) -> Statistics:
    """Compute the statistics of these results."""
    results = list(summaries)
    rewards = _rewards_by_task(results)
    scored = [reward for group in rewards.values() for reward in group]
    mean = math.fsum(scored) / len(scored) if scored else None
    return Statistics(
        tasks=len({(summary.environment, summary.task_id) for summary in results}),
        results=len(results),
        scored=len(scored),
        mean_reward=mean,
        standard_error=None if mean is None else clustered_error(list(rewards.values()), mean),
        pass_at=_pass_at(list(rewards.values())),
        failures=dict(Counter(summary.failure for summary in results if summary.failure is not None)),
        turns=sum(summary.turns for summary in results) / len(results) if results else 0.0,
        tokens=sum(summary.tokens for summary in results),
        sampled_tokens=sum(summary.sampled for summary in results),
    )


def by_environment(summaries: Iterable[Summary]) -> dict[str, Statistics]:
    """Compute the statistics of each environment's results."""
    ordered = sorted(summaries, key=lambda summary: summary.environment)
    return {
        name: statistics_of(group)
        for name, group in groupby(ordered, key=lambda summary: summary.environment)
    }


def clustered_error(groups: Sequence[Sequence[float]], mean: float) -> float | None:
    """Return the standard error of the mean of all values, where values of the same group are correlated.

    The samples of a task share its difficulty, so tasks are the independent units (arXiv 2411.00640, section
    2.2). With one value per group this is the usual s / sqrt(n). Return None for fewer than two groups.
    """
    count, values = len(groups), sum(map(len, groups))
    if count < 2:
        return None
    squares = math.fsum(math.fsum(value - mean for value in group) ** 2 for group in groups)
    return math.sqrt(squares * count / (count - 1)) / values


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of `k` samples solves a task, if
    `solved` of `samples` solved it (arXiv 2107.03374, section 2.1)."""
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def compare(before: Iterable[Summary], after: Iterable[Summary]) -> Comparison:
    """Compare two runs task by task."""
    old, new = (_means(_rewards_by_task(summaries)) for summaries in (before, after))
    tasks = [
        TaskComparison(environment=name, task_id=task, before=old[name, task], after=new[name, task])
        for name, task in sorted(old.keys() & new.keys())
    ]
    changes = [task.change for task in tasks]
    wins, losses = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    mean = math.fsum(changes) / len(changes) if changes else 0.0
    return Comparison(
        tasks=tasks,
        only_before=len(old.keys() - new.keys()),
        only_after=len(new.keys() - old.keys()),
        mean_before=_mean(task.before for task in tasks),
        mean_after=_mean(task.after for task in tasks),
        standard_error=clustered_error([[change] for change in changes], mean),
        wins=wins,
        losses=losses,
        ties=len(tasks) - wins - losses,
        p_value=sign_test(wins, losses),
    )


def sign_test(wins: int, losses: int) -> float:
    """Return the two-sided p-value of the exact sign test: the probability of a split at least as uneven if
    wins and losses are equally likely."""
    trials: int = wins + losses
    tail = sum(math.comb(trials, n) for n in range(min(wins, losses) + 1))
    return min(1.0, float(2 * tail / 2**trials))


def _pass_at(groups: Sequence[Sequence[float]]) -> dict[int, float]:
    largest = max(map(len, groups), default=0)
    sizes = sorted({2**n for n in range(largest.bit_length())} | ({largest} if largest else set()))
    return {k: mean for k in sizes if (mean := _mean(_chances(groups, k))) is not None}


def _chances(groups: Sequence[Sequence[float]], k: int) -> list[float]:
    return [
        pass_at_k(len(group), sum(reward >= SOLVED for reward in group), k)
        for group in groups
        if len(group) >= k
    ]


def _rewards_by_task(summaries: Iterable[Summary]) -> dict[tuple[str, str], list[float]]:
    rewards = defaultdict(list)
    for summary in summaries:
        if summary.reward is not None:
            rewards[summary.environment, summary.task_id].append(summary.reward)
    return rewards


def _means(rewards: Mapping[tuple[str, str], Sequence[float]]) -> dict[tuple[str, str], float]:
    return {task: math.fsum(group) / len(group) for task, group in rewards.items()}


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else None
