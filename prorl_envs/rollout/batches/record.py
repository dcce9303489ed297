"""Conversions between the forms of a batch: request, stored record, plan and API view. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.batches import BatchRequest, BatchTask, BatchView, SelectedGroup
from prorl_envs.rollout.api.types import GroupRequest, job_id, split_job_id
from prorl_envs.rollout.batches.dynamic_sampling import (
    BatchPlan,
    GroupOutcome,
    PlannedGroup,
    SampleOutcome,
    fresh_enough,
)
from prorl_envs.rollout.scheduling.fair_queue import Share
from prorl_envs.rollout.store.base import StoredBatch, StoredGroup


@dataclass(slots=True)
class Batch:
    """Batch with its plan and its tasks.

    Args:
        rows: the tasks of the stream so far.
        read: number of chosen results, see `BatchPlan.chosen`, that the reader has confirmed.
        read_to_the_end: True if the reader has confirmed all chosen results and no further will follow.
    """

    stored: StoredBatch
    plan: BatchPlan
    rows: list[BatchTask]
    read: int = 0
    read_to_the_end: bool = False

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def request(self) -> BatchRequest:
        return self.stored.request

    @property
    def share(self) -> Share:
        """Scheduling share of the batch's jobs."""
        return Share(self.stored.tenant, self.request.weight, self.request.priority)

    @property
    def idle(self) -> bool:
        """True if the batch is finished, and no samples are in flight or must be cancelled."""
        pending = (self.plan.groups[name].pending for name in self.plan.undecided)
        return self.plan.state.over and not any(pending) and not self.plan.unneeded()


def group_request(batch: BatchRequest, row: BatchTask, index: int) -> GroupRequest:
    """Return the group request of a batch's task.

    Raises:
        InputError: neither the batch nor the task names an environment.
    """
    environment = row.environment or batch.environment
    if environment is None:
        raise InputError("no environment is named", hint="name it in the batch or in each task")
    return GroupRequest(
        id=f"{batch.id}/{index}",
        environment=environment,
        task=row.task,
        samples=batch.samples,
        sampling=row.sampling or batch.sampling,
        limits=row.limits or batch.limits,
        metadata=batch.metadata | row.metadata,
    )


def new(request: BatchRequest, source: Batch | None) -> StoredBatch:
    """Return the stored form of a new batch. `source` is the batch whose groups are carried over, if any."""
    leftover = source.plan.carriable if source else []
    carried = [
        group.id for group in leftover if fresh_enough(group, request.weight_version, request.max_staleness)
    ]
    return StoredBatch(
        request,
        tenant=request.tenant or (source.stored.tenant if source else request.id),
        carried=tuple(carried),
        dropped=len(leftover) - len(carried),
        closed=not request.stream_open,
    )


def restore(plan: BatchPlan, batch: StoredBatch, stored: Sequence[StoredGroup]) -> None:
    """Repeat all decisions of a batch in its new plan, from the results of its stored groups."""
    groups = []
    for group in stored:
        ended = {
            job.sample: SampleOutcome(job.cursor, job.reward, job.failure.value if job.failure else "")
            for job in group.jobs
            if job.cursor is not None
        }
        request = group.request
        groups.append(PlannedGroup(request.id, request.samples, group.weight_version, ended))
        started_by_batch, index = split_job_id(request.id)
        without_outcomes = PlannedGroup(request.id, request.samples, group.weight_version)
        if started_by_batch == batch.request.id:
            plan.begin(index, without_outcomes)
        else:
            plan.take(without_outcomes)
    if batch.cancelled_at is not None:
        plan.cancel(batch.cancelled_at)
    plan.replay(groups)


def selected(plan: BatchPlan, name: str) -> SelectedGroup:
    """Return the API view of an informative group."""
    decision, group = plan.decisions[name], plan.groups[name]
    started_by_batch, index = split_job_id(name)
    return SelectedGroup(
        group_id=name,
        job_ids=[job_id(name, sample) for sample in decision.samples],
        rewards=list(decision.rewards),
        mean=decision.mean,
        std=decision.std,
        task_index=index,
        started_by_batch=started_by_batch,
        weight_version=group.weight_version,
    )


def view(batch: Batch) -> BatchView:
    """Return the API view of a batch."""
    plan, stored = batch.plan, batch.stored
    undecided, carriable = len(plan.undecided), len(plan.carriable)
    over = plan.state.over
    counts = plan.counts
    return BatchView(
        id=stored.request.id,
        state=plan.state,
        wanted=stored.request.groups,
        informative=counts[GroupOutcome.INFORMATIVE],
        uninformative=counts[GroupOutcome.UNINFORMATIVE],
        failed=counts[GroupOutcome.FAILED],
        in_flight=0 if over else undecided,
        cancelled=undecided - carriable if over else 0,
        carried_in=len(stored.carried),
        dropped=stored.dropped,
        carriable=carriable,
        carried_over=len(plan.passed_on or ()),
        tasks=plan.tasks,
        started=plan.started,
        stream_open=not plan.closed,
        waiting_for_tasks=plan.waiting_for_tasks,
        reasons=dict(plan.reasons),
        failures=dict(plan.failures),
        weight_version=stored.request.weight_version,
    )
