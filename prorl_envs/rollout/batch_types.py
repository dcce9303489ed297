"""Batches on the wire: what a trainer asks for in one step, and how far it is.

A batch is a stream of tasks and a number of groups wanted of it. The service starts a group for one task
after the other, keeps those a trainer can learn from, and stops when there are enough.
"""

from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from prorl_envs.policy.types import Sampling
from prorl_envs.rollout.types import AgentLimits, BatchId, JobId, Lease, json_problem

#: Rows of one request.
MAX_ROWS = 10_000
#: Ends that are routes of a batch, so no batch can be called so.
_ROUTES = ("/groups", "/tasks", "/results")


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BatchTask(_Wire):
    """One row of the task stream. What it leaves out is the batch's.

    Args:
        task: one data row of the environment.
        environment, sampling, limits: instead of the batch's.
        metadata: given back with the group and its results, over the batch's.
    """

    task: dict[str, Any]
    environment: str | None = Field(default=None, min_length=1, max_length=100)
    sampling: Sampling | None = None
    limits: AgentLimits | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("task", "metadata")
    @classmethod
    def _is_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        if json_problem(value):
            raise ValueError("not JSON: a NaN, an infinity or a lone surrogate is in it")
        return value


class GroupFilter(_Wire):
    """Which groups are informative: their rewards differ, and are within these bounds.

    Args:
        min_spread: least difference between the highest and the lowest reward; 0 asks for any.
        min_mean, max_mean: bounds of the mean reward, themselves included.
    """

    min_spread: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    min_mean: float | None = Field(default=None, allow_inf_nan=False)
    max_mean: float | None = Field(default=None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_mean is not None and self.max_mean is not None and self.min_mean > self.max_mean:
            raise ValueError("min_mean is over max_mean")
        return self


class BatchRequest(_Wire):
    """Ask for `groups` informative groups.

    Args:
        id: the caller's id of the batch; submitting it again is the same submission. The groups are called
            `<id>/<index of the task>`.
        groups: informative groups wanted.
        tasks: the task stream, in the order in which to take it.
        more: further tasks will be appended.
        environment, sampling, limits: of tasks that name none.
        samples: episodes of one group.
        usable: results with a reward that complete a group; the samples still running are then cancelled.
            None waits for all samples, and takes those that have a reward.
        filter: which groups are informative; None takes every group that is complete.
        in_flight: most groups under way at once; None is `groups`.
        spare: most groups under way beyond those still wanted, so that replacements need not be waited
            for; None leaves `in_flight` the only bound, 0 starts a group only where one is missing.
        leftover: what becomes of groups under way when enough are informative: `cancel` ends them, `carry`
            lets them go on, for a later batch that names this one.
        carry_from: batch whose leftover groups, carried, count for this one.
        weight_version: version of the weights that the model servers have as the batch is submitted.
        max_staleness: versions by which a carried group may have begun earlier; older ones are cancelled.
            None takes all.
        tenant: who shares one place in the queue; None is the tenant of `carry_from`, else this batch alone.
        weight: this tenant's share of the pools, relative to others'.
        priority: jobs of a higher priority go first, always.
        lease_s: seconds after which what is under way of it is cancelled, if nobody asks about it; as of a
            group.
        metadata: given back with every group and result.
    """

    id: BatchId
    groups: int = Field(ge=1)
    tasks: list[BatchTask] = Field(default_factory=list, max_length=MAX_ROWS)
    more: bool = False
    environment: str | None = Field(default=None, min_length=1, max_length=100)
    samples: int = Field(default=8, ge=1, le=1024)
    usable: int | None = Field(default=None, ge=1)
    sampling: Sampling = Sampling()
    limits: AgentLimits = AgentLimits()
    filter: GroupFilter | None = GroupFilter()
    in_flight: int | None = Field(default=None, ge=1)
    spare: int | None = Field(default=None, ge=0)
    leftover: Literal["cancel", "carry"] = "cancel"
    carry_from: BatchId | None = None
    weight_version: int | None = Field(default=None, ge=0, le=2**62)
    max_staleness: int | None = Field(default=None, ge=0, le=2**62)
    tenant: JobId | None = None
    weight: float = Field(default=1.0, ge=0.01, le=100, allow_inf_nan=False)
    priority: int = Field(default=0, ge=-100, le=100)
    lease_s: Lease = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("metadata")
    @classmethod
    def _is_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        if json_problem(value):
            raise ValueError("not JSON: a NaN, an infinity or a lone surrogate is in it")
        return value

    @field_validator("id")
    @classmethod
    def _is_no_route(cls, value: str) -> str:
        if value.endswith(_ROUTES):
            raise ValueError(f"ends with one of {', '.join(_ROUTES)}")
        return value

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.usable is not None and self.usable > self.samples:
            raise ValueError("usable is over samples")
        if self.filter is not None and (self.usable or self.samples) < 2:
            raise ValueError("one reward has no spread: ask for 2 or more, or for no filter")
        if self.max_staleness is not None and self.weight_version is None:
            raise ValueError("max_staleness needs the batch's weight_version")
        if self.carry_from == self.id:
            raise ValueError("a batch cannot carry from itself")
        return self


class BatchTasks(_Wire):
    """Tasks to append to the stream.

    Args:
        first: index of the first one, which is the number of tasks so far. Sent again with the same index,
            the same tasks are appended once.
        tasks: the rows.
        more: further ones will come.
    """

    first: int = Field(ge=0)
    tasks: list[BatchTask] = Field(default_factory=list, max_length=MAX_ROWS)
    more: bool = True


class BatchState(StrEnum):
    """Where a batch is. The last three are final."""

    RUNNING = "running"
    COMPLETE = "complete"
    EXHAUSTED = "exhausted"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self is not BatchState.RUNNING


class BatchView(_Wire):
    """How far a batch is.

    Args:
        state: running; complete: enough groups are informative; exhausted: the task stream has ended and
            they are not; cancelled.
        wanted: informative groups asked for.
        informative, uninformative, failed: groups that are decided. Failed are those with too few rewards.
        in_flight: groups under way.
        cancelled: groups ended undecided, since nobody needed them any more.
        carried_in: groups taken over from `carry_from`; `dropped`: groups of it that were too old.
        leftover: groups a later batch may take over.
        carried_over: groups a later batch has taken over.
        tasks: tasks of the stream so far; `started`: how many of them, from the first, have become groups.
        more: further tasks may be appended.
        waiting_for_tasks: a group could be started, and there is no task for it.
        reasons: undesired groups (uninformative and failed), by reason.
        failures: samples without a reward when their group was decided, by failure kind.
        weight_version: as it was submitted.
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
    leftover: int
    carried_over: int
    tasks: int
    started: int
    more: bool
    waiting_for_tasks: bool
    reasons: dict[str, int]
    failures: dict[str, int]
    weight_version: int | None


class BatchList(_Wire):
    """Batches, in the order in which they were submitted."""

    batches: list[BatchView]


class SelectedGroup(_Wire):
    """An informative group: what a trainer trains on.

    Args:
        group_id: of the group.
        job_ids: its samples that count; others have no reward, or came when the group was complete.
        rewards: of these jobs, in their order.
        mean, std: over these rewards (population standard deviation).
        task_index: of its task in the batch that began it.
        begun_by: id of the batch that began it: another one's where it was carried over.
        weight_version: named by the batch that began it.
    """

    group_id: str
    job_ids: list[str]
    rewards: list[float]
    mean: float
    std: float
    task_index: int
    begun_by: str
    weight_version: int | None


class SelectedGroups(_Wire):
    """A batch's informative groups, in the order in which they were decided. Final once the batch is over."""

    state: BatchState
    groups: list[SelectedGroup]
