"""Statistics of groups for trainers. Pure functions of the stored data."""

import math
from collections import Counter
from collections.abc import Sequence

from prorl_envs.rollout.api.types import GroupStatistics
from prorl_envs.rollout.store.base import StoredGroup

#: Rewards that differ by at most this amount count as equal.
SPREAD = 1e-9


def group_statistics(group: StoredGroup) -> GroupStatistics | None:
    """Return the statistics of a group, or None if the group is incomplete.

    A group is informative if its rewards differ: with a group-relative advantage, equal rewards give no
    gradient (the filter of DAPO, arXiv 2503.14476, section 3.2).
    """
    outcomes = [outcome for outcome in group.outcomes if outcome is not None]
    if len(outcomes) < len(group.outcomes):
        return None
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    return GroupStatistics(
        group_id=group.request.id,
        task_id=group.task_id,
        environment=group.request.environment,
        rewards=[outcome.reward for outcome in outcomes],
        mean=mean,
        std=None if mean is None else deviation(rewards, mean),
        informative=bool(rewards) and max(rewards) - min(rewards) > SPREAD,
        failures=dict(Counter(outcome.failure.value for outcome in outcomes if outcome.failure)),
    )


def deviation(values: Sequence[float], mean: float) -> float:
    """Return the population standard deviation."""
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
