"""Choice of the turns at which a finished episode is branched."""

from math import fsum

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.types import BranchRequest, Result, TurnRecord


def branch_points(result: Result, request: BranchRequest) -> list[int]:
    """Return the numbers of turns after which `request.policy` branches an episode, in order.

    The entropy of a turn is estimated as the mean of the negative log-probability of its tokens.

    Raises:
        InputError: the episode has no such place, or not one row of tokens.
    """
    row = result.trajectory
    if row is None or result.forks:
        raise InputError(f"job {result.job_id} has not one row of tokens", hint="name the turns")
    first = result.branch.turns if result.branch else 0

    def surprise(turn: TurnRecord) -> float:
        logprobs = row.logprobs[turn.start : turn.end]
        return -fsum(logprobs) / max(1, len(logprobs))

    turns = {first + index: turn for index, turn in enumerate(row.turns)}
    places = [count for count in turns if count > 0]
    if request.policy == "after_failure":
        places = [count for count in places if count - 1 in turns and turns[count - 1].failed_calls]
    if request.policy == "high_entropy":
        places.sort(key=lambda count: surprise(turns[count]), reverse=True)
        places = sorted(places[: request.points])
    if not places:
        raise InputError(f"job {result.job_id} has no turn to branch at with {request.policy}")
    step = max(1.0, len(places) / request.points)
    return [places[int(step * number)] for number in range(min(request.points, len(places)))]
