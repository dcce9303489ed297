"""What a trainer sees of a group, and of the service. Pure functions of what is stored."""

import math
from collections import Counter
from collections.abc import Sequence

from prorl_envs.rollout.store import StoredGroup
from prorl_envs.rollout.types import GroupStatistics

#: Rewards closer than this count as equal.
SPREAD = 1e-9


def group_statistics(group: StoredGroup) -> GroupStatistics | None:
    """Statistics of a complete group, None for one that is not.

    A group is informative where its rewards differ: with a group-relative advantage, equal rewards give no
    gradient (the filter of DAPO, arXiv 2503.14476, section 3.2).
    """
    outcomes = [outcome for outcome in group.outcomes if outcome is not None]
    if len(outcomes) < len(group.outcomes):
        return None
    given = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    mean = math.fsum(given) / len(given) if given else None
    return GroupStatistics(
        group_id=group.request.id,
        task_id=group.task_id,
        environment=group.request.environment,
        rewards=[outcome.reward for outcome in outcomes],
        mean=mean,
        std=None if mean is None else deviation(given, mean),
        informative=bool(given) and max(given) - min(given) > SPREAD,
        failures=dict(Counter(outcome.failure.value for outcome in outcomes if outcome.failure)),
    )


def deviation(values: Sequence[float], mean: float) -> float:
    """Population standard deviation."""
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
