"""Advantages of the episodes of a group, for trainers that do not compute them. Pure."""

from collections.abc import Sequence
from statistics import fmean, pstdev

from prorl_envs.errors import ProrlError

#: Added to the deviation, as in TRL, so that equal rewards give 0 instead of a division by 0.
_EPSILON = 1e-8


class NothingScored(ProrlError):
    """Error: no episode has a reward, so there is nothing to train on."""


def spread(rewards: Sequence[float | None]) -> float:
    """Return the difference between the highest and the lowest reward; 0.0 for fewer than two rewards."""
    known = [reward for reward in rewards if reward is not None]
    return max(known) - min(known) if len(known) > 1 else 0.0


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """Return each episode's advantage over its group, in standard deviations (GRPO, arXiv 2402.03300).

    Args:
        rewards: rewards of the episodes of one group. None, a failure, is ignored in mean and deviation.

    Returns:
        An advantage for each episode, or None if the episode has no reward.
    """
    known = [reward for reward in rewards if reward is not None]
    if not known:
        return [None] * len(rewards)
    mean, deviation = fmean(known), pstdev(known)
    return [None if reward is None else (reward - mean) / (deviation + _EPSILON) for reward in rewards]


def neutral_rewards(groups: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Replace missing rewards, for trainers that require a number for every episode. An episode without a
    reward gets its group's mean, which changes neither this mean nor the sign of any advantage. A group
    without any reward gets the mean of all groups. The loss mask of such an episode must be 0.

    Raises:
        NothingScored: no episode has a reward.
    """
    known = [reward for group in groups for reward in group if reward is not None]
    if not known:
        raise NothingScored("not one episode has a reward", hint="see the service's log")
    overall = fmean(known)
    return [_filled(group, overall) for group in groups]


def _filled(group: Sequence[float | None], overall: float) -> list[float]:
    known = [reward for reward in group if reward is not None]
    mean = fmean(known) if known else overall
    return [mean if reward is None else reward for reward in group]
