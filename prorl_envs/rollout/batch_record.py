"""A batch in its three shapes: as it is asked for and answered, as it is kept, as it is planned. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from prorl_envs.errors import InputError
from prorl_envs.rollout.batch_plan import BatchPlan, Ended, Group, Rules, Verdict, fresh_enough
from prorl_envs.rollout.batch_types import BatchRequest, BatchTask, BatchView, SelectedGroup
from prorl_envs.rollout.fair_queue import Share
from prorl_envs.rollout.store import StoredBatch, StoredGroup
from prorl_envs.rollout.types import GroupRequest, job_id, split_job_id


@dataclass(slots=True)
class Batch:
    """A batch, its plan, and its tasks."""

    stored: StoredBatch
    plan: BatchPlan
    rows: list[BatchTask]

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def request(self) -> BatchRequest:
        return self.stored.request

    @property
    def share(self) -> Share:
        """What its jobs are entitled to."""
        return Share(self.stored.tenant, self.request.weight, self.request.priority)

    @property
    def idle(self) -> bool:
        """Nothing of it is under way or to be done."""
        pending = (self.plan.groups[name].pending for name in self.plan.undecided)
        return self.plan.state.over and not any(pending) and not self.plan.unneeded()


def rules_of(request: BatchRequest) -> Rules:
    """What a batch wants."""
    return Rules(
        groups=request.groups,
        in_flight=request.in_flight or request.groups,
        spare=request.spare,
        usable=request.usable,
        filter=request.filter,
        carry=request.leftover == "carry",
    )


def group_request(batch: BatchRequest, row: BatchTask, index: int) -> GroupRequest:
    """The group of a batch's task.

    Raises:
        InputError: neither names an environment.
    """
    environment = row.environment or batch.environment
    if environment is None:
        raise InputError("no environment is named", hint="name one in the batch or in each task")
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
    """A new batch as it is kept; `source` is the one it carries from."""
    leftover = source.plan.leftover if source else []
    carried = [
        group.id for group in leftover if fresh_enough(group, request.weight_version, request.max_staleness)
    ]
    return StoredBatch(
        request,
        tenant=request.tenant or (source.stored.tenant if source else request.id),
        carried=tuple(carried),
        dropped=len(leftover) - len(carried),
        closed=not request.more,
    )


def restore(plan: BatchPlan, batch: StoredBatch, stored: Sequence[StoredGroup]) -> None:
    """Decide again what was decided, by the same results in the same order."""
    groups = []
    for group in stored:
        ended = {
            sample: Ended(outcome.cursor, outcome.reward, outcome.failure.value if outcome.failure else "")
            for sample, outcome in enumerate(group.outcomes)
            if outcome is not None
        }
        request = group.request
        groups.append(Group(request.id, request.samples, group.weight_version, ended))
        origin, index = split_job_id(request.id)
        empty = Group(request.id, request.samples, group.weight_version)
        if origin == batch.request.id:
            plan.begin(index, empty)
        else:
            plan.take(empty)
    if batch.cancelled_at is not None:
        plan.cancel(batch.cancelled_at)
    plan.replay(groups)


def selected(plan: BatchPlan, name: str) -> SelectedGroup:
    """A group that was judged informative."""
    judgement, group = plan.judged[name], plan.groups[name]
    begun_by, index = split_job_id(name)
    return SelectedGroup(
        group_id=name,
        job_ids=[job_id(name, sample) for sample in judgement.samples],
        rewards=list(judgement.rewards),
        mean=judgement.mean,
        std=judgement.std,
        task_index=index,
        begun_by=begun_by,
        weight_version=group.weight_version,
    )


def view(batch: Batch) -> BatchView:
    """How far a batch is."""
    plan, stored = batch.plan, batch.stored
    undecided, leftover = len(plan.undecided), len(plan.leftover)
    over = plan.state.over
    counts = plan.counts
    return BatchView(
        id=stored.request.id,
        state=plan.state,
        wanted=stored.request.groups,
        informative=counts[Verdict.INFORMATIVE],
        uninformative=counts[Verdict.UNINFORMATIVE],
        failed=counts[Verdict.FAILED],
        in_flight=0 if over else undecided,
        cancelled=undecided - leftover if over else 0,
        carried_in=len(stored.carried),
        dropped=stored.dropped,
        leftover=leftover,
        carried_over=len(plan.passed_on or ()),
        tasks=plan.tasks,
        started=plan.started,
        more=not plan.closed,
        waiting_for_tasks=plan.waiting_for_tasks,
        reasons=dict(plan.reasons),
        failures=dict(plan.failures),
        weight_version=stored.request.weight_version,
    )
