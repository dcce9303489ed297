"""Recovery after a restart: plan how the unfinished jobs of an earlier service continue."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from prorl_envs.env.base import Task
from prorl_envs.errors import FailureKind, InputError
from prorl_envs.rollout.api.types import Failure, GroupRequest, Stage
from prorl_envs.rollout.episode.job import Job
from prorl_envs.rollout.store.base import StoredGroup

log = logging.getLogger(__name__)

#: Maximum number of a job's attempts that a stop of the service interrupted. A stop is not the job's fault,
#: but a job with so many may itself be the cause of the stops.
MAX_INTERRUPTIONS = 100


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """Recovery plan of a group.

    Args:
        task: the group's task; None if this service does not offer its environment.
        samples: indices of the samples that continue.
        given_up: jobs of the samples that do not continue, with their failures.
    """

    task: Task | None
    samples: list[int]
    given_up: list[Job]


def plan_recovery(group: StoredGroup, load: Callable[[GroupRequest], Task]) -> RecoveryPlan:
    """Plan the recovery of a group's unfinished jobs.

    Args:
        group: the stored group.
        load: returns the task of a request, or raises InputError.
    """
    missing = [job.sample for job in group.jobs if not job.state.final]
    try:
        task = load(group.request)
    except InputError as error:
        log.error("group %s of an earlier service cannot be resumed: %s", group.request.id, error)
        failure = _not_offered(error)
        return RecoveryPlan(None, [], [_unstarted(group, sample, failure) for sample in missing])
    # Attempts with neither failure nor result were interrupted when their service stopped.
    interrupted = [i for i in missing if group.jobs[i].attempts - group.failures[i] >= MAX_INTERRUPTIONS]
    for sample in interrupted:
        log.error("job %s/%d was interrupted too often, and fails", group.request.id, sample)
    given_up = [_unstarted(group, sample, _interrupted()) for sample in interrupted]
    return RecoveryPlan(task, [sample for sample in missing if sample not in interrupted], given_up)


def _unstarted(group: StoredGroup, sample: int, failure: Failure) -> Job:
    job = Job(
        group.request, sample, Task.model_construct(id=group.task_id), 0.0, batch_id=group.started_by_batch
    )
    job.attempts, job.attempt.failure = group.jobs[sample].attempts, failure
    return job


def _not_offered(error: InputError) -> Failure:
    return Failure(
        kind=FailureKind.ENVIRONMENT,
        stage=Stage.INIT,
        message=f"this service cannot resume the jobs of an earlier service: {error.message}",
        hint=error.hint,
    )


def _interrupted() -> Failure:
    return Failure(
        kind=FailureKind.INTERNAL,
        stage=Stage.INIT,
        message=f"the service stopped during {MAX_INTERRUPTIONS} attempts of this job",
        hint="see the service's log; if the job was not the reason, submit it again under a new id",
    )
