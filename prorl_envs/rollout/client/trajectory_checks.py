"""Checks that a trajectory must pass before training. Pure."""

from prorl_envs.errors import ProrlError
from prorl_envs.rollout.api.types import Trajectory


class NotContiguous(ProrlError):
    """Error: the tokens of the model calls are not contiguous, so they do not form one row."""


def check_trajectory(trajectory: Trajectory) -> None:
    """Check that the turns are ordered spans of the tokens and match the loss mask.

    Raises:
        NotContiguous: the turns overlap, or do not match the loss mask.
    """
    length = len(trajectory.ids)
    if not length == len(trajectory.loss_mask) == len(trajectory.logprobs):
        raise NotContiguous("ids, loss mask and log-probabilities differ in length")
    mask, end = [0] * length, 0
    for number, turn in enumerate(trajectory.turns):
        if not end <= turn.start <= turn.end <= length:
            raise NotContiguous(
                f"turn {number} spans [{turn.start}, {turn.end}) of {length} tokens, after {end}"
            )
        mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
        end = turn.end
    if mask != trajectory.loss_mask:
        raise NotContiguous("the loss mask does not match the sampled tokens of the turns")
