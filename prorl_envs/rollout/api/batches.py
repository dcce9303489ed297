"""Wire types of batches: the request of a trainer for one step, and its progress.

A batch is a stream of tasks and a number of wanted groups. The service starts one group per task, keeps the
groups that a trainer can learn from, and stops when it has enough.
"""

from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.types import AgentLimits, BatchId, JobId, JsonFields, Lease, WireModel

#: Maximum number of tasks in one request.
MAX_ROWS = 10_000
#: Suffixes of a batch's routes. No batch id may end with one of them.
_ROUTES = ("/groups", "/tasks", "/results")


class BatchTask(WireModel):
    """One row of the task stream. Missing fields take the batch's values.

    Args:
        task: one data row of the environment.
        environment, sampling, limits: override the batch's values.
        metadata: returned with the group and its results; overrides the batch's metadata.
    """

    task: JsonFields
    environment: str | None = Field(default=None, min_length=1, max_length=100)
    sampling: Sampling | None = None
    limits: AgentLimits | None = None
    metadata: JsonFields = Field(default_factory=dict)


class GroupFilter(WireModel):
    """Filter for informative groups: their rewards differ and are within these bounds.

    Args:
        min_spread: minimum difference between the highest and the lowest reward; 0 accepts any difference.
        min_mean, max_mean: inclusive bounds of the mean reward.
    """

    min_spread: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    min_mean: float | None = Field(default=None, allow_inf_nan=False)
    max_mean: float | None = Field(default=None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_mean is not None and self.max_mean is not None and self.min_mean > self.max_mean:
            raise ValueError("min_mean is over max_mean")
        return self


class BatchRequest(WireModel):
    """Request for `groups` informative groups.

    Args:
        id: the caller's id of the batch; submitting the same request again has no further effect. The groups
            are called `<id>/<index of the task>`.
        groups: number of informative groups wanted.
        tasks: the task stream, in the order in which the tasks are used.
        stream_open: further tasks will be appended.
        environment, sampling, limits: values for tasks that have none of their own.
        samples: number of jobs in each group.
        min_rewards: number of results with a reward that complete a group; the samples still running are
            then cancelled. None waits for all samples and uses those that have a reward.
        filter: condition for informative groups; None accepts every complete group.
        in_flight: maximum number of groups in flight at once; None takes the value of `groups`.
        max_speculative_groups: maximum number of groups in flight beyond the number still missing, so that
            the batch need not wait for replacements. 0 starts only as many groups as are missing. With None,
            `in_flight` is the only limit.
        on_complete: handling of groups in flight when enough groups are informative: `cancel` cancels them,
            `carry` lets them continue for a later batch that names this batch in `carry_from`.
        carry_from: earlier batch whose carried groups count for this batch.
        weight_version: version of the weights on the model servers when the batch is submitted.
        max_staleness: maximum number of versions by which a carried group may be older than this batch;
            older groups are cancelled. None accepts all.
        tenant: name of the lane in the queue that batches share; None takes the tenant of `carry_from`, or a
            lane of this batch's own.
        weight: this tenant's share of the pools, relative to other tenants.
        priority: jobs of a higher priority always run first.
        lease_s: unfinished jobs are cancelled after this many seconds without a request, see `GroupRequest`.
        metadata: returned with every group and result.
    """

    id: BatchId
    groups: int = Field(ge=1)
    tasks: list[BatchTask] = Field(default_factory=list, max_length=MAX_ROWS)
    stream_open: bool = False
    environment: str | None = Field(default=None, min_length=1, max_length=100)
    samples: int = Field(default=8, ge=1, le=1024)
    min_rewards: int | None = Field(default=None, ge=1)
    sampling: Sampling = Sampling()
    limits: AgentLimits = AgentLimits()
    filter: GroupFilter | None = GroupFilter()
    in_flight: int | None = Field(default=None, ge=1)
    max_speculative_groups: int | None = Field(default=None, ge=0)
    on_complete: Literal["cancel", "carry"] = "cancel"
    carry_from: BatchId | None = None
    weight_version: int | None = Field(default=None, ge=0, le=2**62)
    max_staleness: int | None = Field(default=None, ge=0, le=2**62)
    tenant: JobId | None = None
    weight: float = Field(default=1.0, ge=0.01, le=100, allow_inf_nan=False)
    priority: int = Field(default=0, ge=-100, le=100)
    lease_s: Lease = None
    metadata: JsonFields = Field(default_factory=dict)

    @field_validator("id")
    @classmethod
    def _is_no_route(cls, value: str) -> str:
        if value.endswith(_ROUTES):
            raise ValueError(f"ends with one of {', '.join(_ROUTES)}")
        return value

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.min_rewards is not None and self.min_rewards > self.samples:
            raise ValueError("min_rewards is over samples")
        if self.filter is not None and (self.min_rewards or self.samples) < 2:
            raise ValueError("one reward has no spread: request 2 or more rewards, or no filter")
        if self.max_staleness is not None and self.weight_version is None:
            raise ValueError("max_staleness needs the batch's weight_version")
        if self.carry_from == self.id:
            raise ValueError("a batch cannot carry from itself")
        return self


class BatchTasks(WireModel):
    """Tasks to append to the stream.

    Args:
        first: index of the first task, which is the number of tasks so far. Tasks that are sent again with
            the same index are not appended again.
        tasks: the tasks to append.
        stream_open: further tasks will follow.
    """

    first: int = Field(ge=0)
    tasks: list[BatchTask] = Field(default_factory=list, max_length=MAX_ROWS)
    stream_open: bool = True


class BatchState(StrEnum):
    """State of a batch. The last three are final."""

    RUNNING = "running"
    COMPLETE = "complete"
    EXHAUSTED = "exhausted"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self is not BatchState.RUNNING


class BatchView(WireModel):
    """Progress of a batch.

    Args:
        state: running; complete: enough groups are informative; exhausted: the task stream was used up before
            enough groups were informative; cancelled.
        wanted: number of informative groups in the request.
        informative, uninformative, failed: numbers of decided groups. Failed groups have too few rewards.
        in_flight: number of groups in flight.
        cancelled: groups that were cancelled before they were decided, because they were no longer needed.
        carried_in: groups taken over from `carry_from`; `dropped`: groups of `carry_from` that were too old.
        carriable: groups that a later batch may take over.
        carried_over: groups that a later batch has taken over.
        tasks: number of tasks in the stream so far; `started`: number of tasks that became groups.
        stream_open: further tasks may be appended.
        waiting_for_tasks: a group could be started, but there is no task for it.
        reasons: number of uninformative and failed groups, by reason.
        failures: number of samples without a reward when their group was decided, by failure kind.
        weight_version: the version in the request.
    """

    id: str
    state: BatchState
    wanted: int
    informative: int
    uninformative: int
    failed: int
    in_flight: int
    cancelled: int
    carried_in: int
    dropped: int
    carriable: int
    carried_over: int
    tasks: int
    started: int
    stream_open: bool
    waiting_for_tasks: bool
    reasons: dict[str, int]
    failures: dict[str, int]
    weight_version: int | None


class BatchList(WireModel):
    """Batches, in the order of their submission."""

    batches: list[BatchView]


class SelectedGroup(WireModel):
    """Informative group, ready for training.

    Args:
        group_id: id of the group.
        job_ids: jobs to train on. The group's other jobs have no reward, or finished after the group was
            complete.
        rewards: rewards of these jobs, in the same order.
        mean, std: mean and population standard deviation of these rewards.
        task_index: index of the group's task in the batch that started the group.
        started_by_batch: id of the batch that started the group; another batch if the group was carried over.
        weight_version: weight version in the request of the batch that started the group.
    """

    group_id: str
    job_ids: list[str]
    rewards: list[float]
    mean: float
    std: float
    task_index: int
    started_by_batch: str
    weight_version: int | None


class SelectedGroups(WireModel):
    """Informative groups of a batch, in the order of decision. More may follow until `state` is final."""

    state: BatchState
    groups: list[SelectedGroup]
