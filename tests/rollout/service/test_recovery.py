"""Recovery of unfinished jobs after a restart, and statistics of stored groups, without a service."""

import pytest

from prorl_envs.env.base import Task
from prorl_envs.errors import FailureKind, InputError
from prorl_envs.rollout.api.types import GroupRequest, JobState, Stage
from prorl_envs.rollout.api.views import JobView
from prorl_envs.rollout.service.recovery import MAX_INTERRUPTIONS, plan_recovery
from prorl_envs.rollout.store.base import SPREAD, StoredGroup, group_statistics
from tests.support.toy import ToyTask

TASK = ToyTask(id="t", instruction="Say it.")


def load(request: GroupRequest) -> Task:
    return TASK


def job(sample: int = 0, attempts: int = 0) -> JobView:
    return JobView(id=f"g/{sample}", group_id="g", sample=sample, state=JobState.QUEUED, attempts=attempts)


def outcome(reward: float | None, cursor: int = 1) -> JobView:
    failure = FailureKind.MODEL if reward is None else None
    state = JobState.DONE if reward is not None else JobState.FAILED
    fields = {"state": state, "reward": reward, "failure": failure, "cursor": cursor, "attempts": 1}
    return job().model_copy(update=fields)


def group(
    *outcomes: JobView | None, attempts: tuple[int, ...] = (), failures: tuple[int, ...] = ()
) -> StoredGroup:
    none = (0,) * len(outcomes)
    jobs = (
        outcome.model_copy(update={"sample": sample}) if outcome else job(sample, (attempts or none)[sample])
        for sample, outcome in enumerate(outcomes)
    )
    request = GroupRequest(id="g", environment="toy", task={}, samples=len(outcomes), metadata={"step": 3})
    return StoredGroup(request, "t", tuple(jobs), failures or none, batch_id=None)


def test_only_unfinished_samples_are_resumed() -> None:
    plan = plan_recovery(group(None, outcome(1.0), None), load)
    assert (plan.task, plan.samples, plan.given_up) == (TASK, [0, 2], [])


def test_a_job_that_was_interrupted_too_often_fails() -> None:
    """Only attempts that were interrupted with their service count, not those that failed by themselves."""
    most = MAX_INTERRUPTIONS
    stored = group(None, None, None, attempts=(most, most - 1, most + 2), failures=(0, 0, 3))
    plan = plan_recovery(stored, load)
    assert plan.samples == [1, 2]
    failed = plan.given_up[0].result(JobState.FAILED)
    assert len(plan.given_up) == 1
    assert (failed.job_id, failed.sample, failed.attempts) == ("g/0", 0, most)
    assert (failed.state, failed.reward, failed.mask_sample) == (JobState.FAILED, None, True)
    assert failed.failure is not None and failed.failure.kind is FailureKind.INTERNAL
    assert failed.failure.stage is Stage.INIT and failed.failure.hint
    assert (failed.group_id, failed.task_id, failed.environment) == ("g", "t", "toy")
    assert failed.metadata == {"step": 3}


def test_jobs_of_an_environment_that_is_gone_fail_with_its_message() -> None:
    def refuse(request: GroupRequest) -> Task:
        raise InputError("no environment toy", hint="add it")

    plan = plan_recovery(group(None, outcome(0.0), None), refuse)
    assert (plan.task, plan.samples) == (None, [])
    assert [job.sample for job in plan.given_up] == [0, 2]
    for result in (job.result(JobState.FAILED) for job in plan.given_up):
        assert result.failure is not None and result.failure.kind is FailureKind.ENVIRONMENT
        assert "no environment toy" in result.failure.message and result.failure.hint == "add it"


@pytest.mark.parametrize(
    ("rewards", "informative"),
    [
        ((0.0, 1.0), True),
        ((1.0, 1.0), False),
        ((0.0, SPREAD), False),
        ((0.0, 2 * SPREAD), True),
        ((None, None), False),
    ],
)
def test_a_group_is_informative_if_its_rewards_differ(
    rewards: tuple[float | None, ...], informative: bool
) -> None:
    found = group_statistics(group(*map(outcome, rewards)))
    assert found is not None and found.informative is informative


def test_statistics_leave_failures_out() -> None:
    assert group_statistics(group(outcome(1.0), None)) is None, "not complete"
    found = group_statistics(group(outcome(1.0), outcome(None), outcome(0.0), outcome(0.5)))
    assert found is not None
    assert (found.group_id, found.task_id, found.environment) == ("g", "t", "toy")
    assert found.rewards == [1.0, None, 0.0, 0.5] and found.failures == {"model": 1}
    assert found.mean == 0.5 and found.std == pytest.approx((1 / 6) ** 0.5)
    empty = group_statistics(group(outcome(None)))
    assert empty is not None and (empty.mean, empty.std) == (None, None)
