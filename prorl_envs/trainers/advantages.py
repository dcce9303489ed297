"""Advantages of a group's episodes, for trainers that want them made. Pure."""

from collections.abc import Sequence
from statistics import fmean, pstdev

from prorl_envs.errors import ProrlError

#: As TRL, so that equal rewards give 0 and not a division by it.
_EPSILON = 1e-8


class NothingScored(ProrlError):
    """Not one episode has a reward: there is nothing to train on."""


def spread(rewards: Sequence[float | None]) -> float:
    """The difference between the highest and the lowest reward; 0.0 where fewer than two are there."""
    known = [reward for reward in rewards if reward is not None]
    return max(known) - min(known) if len(known) > 1 else 0.0


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """How much better than its group each episode was, in standard deviations (GRPO, arXiv 2402.03300).

    Args:
        rewards: of the episodes of one group; None, a failure, is in neither mean nor deviation.

    Returns:
        one for each episode; None where there is no reward.
    """
    known = [reward for reward in rewards if reward is not None]
    if not known:
        return [None] * len(rewards)
    mean, deviation = fmean(known), pstdev(known)
    return [None if reward is None else (reward - mean) / (deviation + _EPSILON) for reward in rewards]


def neutral_rewards(groups: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Rewards for trainers that take a number in each place. An episode without a reward gets its group's
    mean, which moves neither that mean nor anybody's sign; a group without any gets the mean of all groups.
    The loss mask of such an episode has to be 0.

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
