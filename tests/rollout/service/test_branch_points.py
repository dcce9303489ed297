"""Choice of the turns at which a finished episode is branched."""

from typing import Any

import pytest
from pydantic import ValidationError

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.types import BranchOrigin, BranchRequest, JobState, Result, Trajectory, TurnRecord
from prorl_envs.rollout.service.branch_points import branch_points


def episode(*turns: tuple[float, int], shared: int = 0) -> Result:
    """Return an episode whose turns have these log-probabilities and numbers of failed calls."""
    model: dict[str, Any] = {
        "finish_reason": "stop",
        "weight_version": "",
        "server": "s",
        "model_s": 1,
        "tools_s": 1,
    }
    records = [
        TurnRecord(start=3 * i + 1, end=3 * i + 3, failed_calls=failed, **model)
        for i, (_, failed) in enumerate(turns)
    ]
    row = Trajectory(
        ids=[7] * (3 * len(turns)),
        loss_mask=[0, 1, 1] * len(turns),
        logprobs=[value for logprob, _ in turns for value in (0.0, logprob, logprob)],
        turns=records,
    )
    branch = BranchOrigin(job_id="e/0", turns=shared, lost=[]) if shared else None
    names = {"job_id": "g/0", "group_id": "g", "sample": 0, "environment": "bash", "task_id": "t"}
    outcome = {
        "state": JobState.DONE,
        "reward": 1.0,
        "mask_sample": False,
        "stop_reason": None,
        "failure": None,
    }
    return Result(**names, **outcome, trajectory=row, branch=branch)  # type: ignore[arg-type]


TEN = [(-0.1 * turn, int(turn in (2, 5, 9))) for turn in range(10)]


@pytest.mark.parametrize(
    ("policy", "points", "places"),
    [
        ("evenly", 3, [1, 4, 7]),
        ("evenly", 100, list(range(1, 10))),
        ("after_failure", 5, [3, 6]),  # nothing follows the last turn
        ("after_failure", 1, [3]),
        ("high_entropy", 2, [8, 9]),
        ("high_entropy", 100, list(range(1, 10))),
    ],
)
def test_a_policy_chooses_its_turns(policy: Any, points: int, places: list[int]) -> None:
    assert branch_points(episode(*TEN), BranchRequest(policy=policy, points=points)) == places


def test_turns_are_counted_from_the_start_of_the_conversation() -> None:
    branched = episode((-0.5, 0), (-0.1, 1), (-0.9, 0), shared=4)
    assert branch_points(branched, BranchRequest(policy="high_entropy", points=2)) == [4, 6]
    assert branch_points(branched, BranchRequest(policy="after_failure")) == [6]


@pytest.mark.parametrize("policy", ["evenly", "after_failure", "high_entropy"])
def test_an_episode_without_a_place_is_refused(policy: Any) -> None:
    for result in (episode(), episode((-1.0, 1))):
        with pytest.raises(InputError, match="no turn to branch"):
            branch_points(result, BranchRequest(policy=policy))
    with pytest.raises(InputError, match="one row"):
        branch_points(episode().model_copy(update={"trajectory": None}), BranchRequest(policy=policy))


@pytest.mark.parametrize(
    "fields", [{}, {"turns": [1], "policy": "evenly"}, {"turns": [0]}, {"policy": "best"}]
)
def test_a_request_names_turns_or_a_policy(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        BranchRequest(**fields)
