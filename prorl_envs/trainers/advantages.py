"""Advantages of a group's episodes, for trainers that do not compute them. Pure."""

from collections.abc import Sequence
from statistics import fmean, pstdev

from prorl_envs.errors import ProrlError

#: As in TRL, so that equal rewards give 0 instead of a division by 0.
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
        rewards: of the episodes of one group; None, a failure, counts for neither mean nor deviation.

    Returns:
        one for each episode; None if there is no reward.
    """
    known = [reward for reward in rewards if reward is not None]
    if not known:
        return [None] * len(rewards)
    mean, deviation = fmean(known), pstdev(known)
    return [None if reward is None else (reward - mean) / (deviation + _EPSILON) for reward in rewards]


def neutral_rewards(groups: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Fill missing rewards for trainers that require a number for every episode. An episode without a reward
    gets its group's mean, which changes neither that mean nor the sign of any advantage; a group without any
    reward gets the mean of all groups. The loss mask of such an episode must be 0.

    Raises:
        NothingScored: there is no reward at all.
    """
    known = [reward for group in groups for reward in group if reward is not None]
    if not known:
        raise NothingScored("not one episode has a reward", hint="the service's log says why")
    overall = fmean(known)
    return [_filled(group, overall) for group in groups]


def _filled(group: Sequence[float | None], overall: float) -> list[float]:
    known = [reward for reward in group if reward is not None]
    mean = fmean(known) if known else overall
    return [mean if reward is None else reward for reward in group]
