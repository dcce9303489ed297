"""API views of groups and jobs, from stored outcomes and the state of unfinished jobs."""

from prorl_envs.rollout.api.types import JobState, job_id
from prorl_envs.rollout.api.views import GroupView, JobView
from prorl_envs.rollout.episode.engine import Engine
from prorl_envs.rollout.store.base import StoredGroup
from prorl_envs.rollout.store.statistics import group_statistics


def group_view(group: StoredGroup, engine: Engine) -> GroupView:
    """Return the view of a group.

    Args:
        group: the stored group.
        engine: knows the state of the group's unfinished jobs.
    """
    request = group.request
    return GroupView(
        id=request.id,
        environment=request.environment,
        task_id=group.task_id,
        jobs=[job_view(group, sample, engine) for sample in range(request.samples)],
        complete=group.complete,
        statistics=group_statistics(group),
        batch_id=group.batch_id,
    )


def job_view(group: StoredGroup, sample: int, engine: Engine) -> JobView:
    """Return the view of one job of a group, by sample index."""
    job, outcome = job_id(group.request.id, sample), group.outcomes[sample]
    return JobView(
        id=job,
        group_id=group.request.id,
        sample=sample,
        state=outcome.state if outcome else engine.scheduler.state(job) or JobState.QUEUED,
        attempts=outcome.attempts if outcome else engine.attempts(job),
        reward=outcome.reward if outcome else None,
        failure=outcome.failure if outcome else None,
        cursor=outcome.cursor if outcome else None,
    )
