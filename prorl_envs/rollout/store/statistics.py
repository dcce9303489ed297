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
    if not group.complete:
        return None
    rewards = [job.reward for job in group.jobs if job.reward is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    return GroupStatistics(
        group_id=group.request.id,
        task_id=group.task_id,
        environment=group.request.environment,
        rewards=[job.reward for job in group.jobs],
        mean=mean,
        std=None if mean is None else deviation(rewards, mean),
        informative=bool(rewards) and max(rewards) - min(rewards) > SPREAD,
        failures=dict(Counter(job.failure.value for job in group.jobs if job.failure)),
    )


def deviation(values: Sequence[float], mean: float) -> float:
    """Return the population standard deviation."""
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
