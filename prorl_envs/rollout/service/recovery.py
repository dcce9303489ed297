"""Recovery after a restart: plans how the unfinished jobs of an earlier service continue."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from prorl_envs.env.base import Task
from prorl_envs.errors import FailureKind, InputError
from prorl_envs.rollout.api.types import Failure, GroupRequest, JobState, Result, Stage, job_id
from prorl_envs.rollout.store.base import StoredGroup

log = logging.getLogger(__name__)

#: Attempts of one job that a service stop may interrupt. Beyond that, the job itself may cause the stops.
MAX_INTERRUPTIONS = 10


@dataclass(frozen=True, slots=True)
class Leftover:
    """Recovery plan of a group.

    Args:
        task: its task; None if this service does not offer its environment.
        samples: samples that continue.
        given_up: results of the samples that do not.
    """

    task: Task | None
    samples: list[int]
    given_up: list[Result]


def sort_out(group: StoredGroup, load: Callable[[GroupRequest], Task]) -> Leftover:
    """Plan the recovery of a group's unfinished jobs.

    Args:
        group: as it was stored.
        load: returns its task, or raises InputError.
    """
    missing = [sample for sample, outcome in enumerate(group.outcomes) if outcome is None]
    try:
        task = load(group.request)
    except InputError as error:
        log.error("group %s of an earlier service cannot be resumed: %s", group.request.id, error)
        failure = _not_offered(error)
        return Leftover(None, [], [_unstarted(group, sample, failure) for sample in missing])
    # Attempts with neither failure nor result were interrupted when their service stopped.
    worn = [i for i in missing if group.attempts[i] - group.failures[i] >= MAX_INTERRUPTIONS]
    for sample in worn:
        log.error("job %s/%d was interrupted too often and ends", group.request.id, sample)
    given_up = [_unstarted(group, sample, _interrupted()) for sample in worn]
    return Leftover(task, [sample for sample in missing if sample not in worn], given_up)


def _unstarted(group: StoredGroup, sample: int, failure: Failure) -> Result:
    """Return the result of a stored job that cannot be started again."""
    request = group.request
    return Result(
        job_id=job_id(request.id, sample),
        group_id=request.id,
        batch_id=group.started_by_batch,
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
        message=f"this service cannot resume the jobs of an earlier one: {error.message}",
        hint=error.hint,
    )


def _interrupted() -> Failure:
    return Failure(
        kind=FailureKind.INTERNAL,
        stage=Stage.INIT,
        message=f"the service ended during {MAX_INTERRUPTIONS} attempts at this job",
        hint="look into the service's log; if the job was not the reason, submit it again under a new id",
    )
