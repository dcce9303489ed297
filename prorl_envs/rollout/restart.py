"""What an earlier service left unfinished, and what becomes of it in this one. Nothing is done here."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from prorl_envs.env.base import Task
from prorl_envs.errors import FailureKind, InputError
from prorl_envs.rollout.store import StoredGroup
from prorl_envs.rollout.types import Failure, GroupRequest, JobState, Result, Stage, job_id

log = logging.getLogger(__name__)

#: Attempts of one job that may end with their service. More are not bad luck: the job itself may end it.
MAX_INTERRUPTIONS = 10


@dataclass(frozen=True, slots=True)
class Leftover:
    """What becomes of a group.

    Args:
        task: its task; None where this service has no environment for it.
        samples: those that go on.
        given_up: results of those that do not.
    """

    task: Task | None
    samples: list[int]
    given_up: list[Result]


def sort_out(group: StoredGroup, load: Callable[[GroupRequest], Task]) -> Leftover:
    """Decide about the unfinished jobs of a group.

    Args:
        group: as it was stored.
        load: makes its task, or raises InputError.
    """
    missing = [sample for sample, outcome in enumerate(group.outcomes) if outcome is None]
    try:
        task = load(group.request)
    except InputError as error:
        log.error("group %s of an earlier service cannot go on: %s", group.request.id, error)
        failure = _not_offered(error)
        return Leftover(None, [], [_unstarted(group, sample, failure) for sample in missing])
    # Attempts that did not fail, and gave no result either, ended with their service.
    worn = [i for i in missing if group.attempts[i] - group.failures[i] >= MAX_INTERRUPTIONS]
    for sample in worn:
        log.error("job %s/%d was interrupted too often and ends", group.request.id, sample)
    given_up = [_unstarted(group, sample, _interrupted()) for sample in worn]
    return Leftover(task, [sample for sample in missing if sample not in worn], given_up)


def _unstarted(group: StoredGroup, sample: int, failure: Failure) -> Result:
    """What a stored job comes to that cannot be started again."""
    request = group.request
    return Result(
        job_id=job_id(request.id, sample),
        group_id=request.id,
        batch_id=group.begun_by,
        sample=sample,
        environment=request.environment,
        task_id=group.task_id,
        state=JobState.FAILED,
        reward=None,
        mask_sample=True,
        stop_reason=None,
        failure=failure,
        attempts=group.attempts[sample],
        metadata=request.metadata,
    )


def _not_offered(error: InputError) -> Failure:
    return Failure(
        kind=FailureKind.ENVIRONMENT,
        stage=Stage.INIT,
        message=f"this service cannot go on with what an earlier one accepted: {error.message}",
        hint=error.hint,
    )


def _interrupted() -> Failure:
    return Failure(
        kind=FailureKind.INTERNAL,
        stage=Stage.INIT,
        message=f"the service ended during {MAX_INTERRUPTIONS} attempts at this job",
        hint="look into the service's log; if the job was not the reason, submit it again under a new id",
    )
