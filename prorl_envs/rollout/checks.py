"""What must hold of a trajectory before anybody trains on it. Pure."""

from prorl_envs.errors import ProrlError
from prorl_envs.rollout.types import Trajectory


class NotContiguous(ProrlError):
    """The tokens of model calls do not continue each other: they are no single row."""


def check_trajectory(trajectory: Trajectory) -> None:
    """That the turns are spans of the tokens, in order, and are what the mask says was sampled.

    Raises:
        NotContiguous: they are not.
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
        raise NotContiguous("the loss mask is not what the turns sampled")
