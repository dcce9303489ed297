"""Wire types of batches: the request of a trainer for one step, and its progress.

A batch is a stream of tasks and a number of wanted groups. The service starts one group per task, keeps the
groups that a trainer can learn from, and stops when it has enough.
"""

from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.types import AgentLimits, BatchId, JobId, Lease
from prorl_envs.strict_json import json_problem

#: Most rows of one request.
MAX_ROWS = 10_000
#: Endings that are routes of a batch; no batch id may end with one of them.
_ROUTES = ("/groups", "/tasks", "/results")


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BatchTask(_Wire):
    """One row of the task stream. Missing fields take the batch's values.

    Args:
        task: one data row of the environment.
        environment, sampling, limits: override the batch's values.
        metadata: returned with the group and its results; overrides the batch's metadata.
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
    """Filter for informative groups: their rewards differ and are within these bounds.

    Args:
        min_spread: least difference between the highest and the lowest reward; 0 accepts any difference.
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


class BatchRequest(_Wire):
    """Request for `groups` informative groups.

    Args:
        id: the caller's id of the batch; submitting the same request again has no further effect. The groups
            are called `<id>/<index of the task>`.
        groups: number of informative groups wanted.
        tasks: the task stream, in the order in which the tasks are used.
        stream_open: further tasks will be appended.
        environment, sampling, limits: for tasks that name none.
        samples: jobs of one group.
        min_rewards: results with a reward that complete a group; the samples still running are then
            cancelled. None waits for all samples and uses those that have a reward.
        filter: condition for informative groups; None accepts every complete group.
        in_flight: most groups in flight at once; None is `groups`.
        max_speculative_groups: most groups in flight beyond those still wanted, so that the batch need not
            wait for replacements; None leaves `in_flight` the only bound, 0 starts a group only if one is
            missing.
        on_complete: handling of groups in flight when enough groups are informative: `cancel` cancels them,
            `carry` lets them continue for a later batch that names this one.
        carry_from: batch whose carried leftover groups count for this one.
        weight_version: version of the weights on the model servers when the batch is submitted.
        max_staleness: most versions by which a carried group may be older; older ones are cancelled. None
            accepts all.
        tenant: name under which batches share one place in the queue; None is the tenant of `carry_from`,
            otherwise this batch alone.
        weight: this tenant's share of the pools, relative to other tenants.
        priority: jobs of a higher priority always run first.
        lease_s: seconds without a request about the batch after which its unfinished work is cancelled, as
            for a group.
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
        if self.min_rewards is not None and self.min_rewards > self.samples:
            raise ValueError("min_rewards is over samples")
        if self.filter is not None and (self.min_rewards or self.samples) < 2:
            raise ValueError("one reward has no spread: ask for 2 or more, or for no filter")
        if self.max_staleness is not None and self.weight_version is None:
            raise ValueError("max_staleness needs the batch's weight_version")
        if self.carry_from == self.id:
            raise ValueError("a batch cannot carry from itself")
        return self


class BatchTasks(_Wire):
    """Tasks to append to the stream.

    Args:
        first: index of the first task, which is the number of tasks so far. Tasks that are sent again with
            the same index are appended once.
        tasks: the rows.
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


class BatchView(_Wire):
    """Progress of a batch.

    Args:
        state: running; complete: enough groups are informative; exhausted: the task stream is used up before
            enough groups are informative; cancelled.
        wanted: number of informative groups in the request.
        informative, uninformative, failed: decided groups. Failed groups have too few rewards.
        in_flight: groups in flight.
        cancelled: groups that were cancelled undecided because they were no longer needed.
        carried_in: groups taken over from `carry_from`; `dropped`: groups of `carry_from` that were too old.
        carriable: groups that a later batch may take over.
        carried_over: groups that a later batch has taken over.
        tasks: tasks of the stream so far; `started`: number of these, from the first, that became groups.
        stream_open: further tasks may be appended.
        waiting_for_tasks: a group could be started, but there is no task for it.
        reasons: uninformative and failed groups, by reason.
        failures: samples without a reward when their group was decided, by failure kind.
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


class BatchList(_Wire):
    """Batches, in the order of their submission."""

    batches: list[BatchView]


class SelectedGroup(_Wire):
    """Informative group, ready for training.

    Args:
        group_id: id of the group.
        job_ids: samples that count; others have no reward or finished after the group was complete.
        rewards: rewards of these jobs, in the same order.
        mean, std: over these rewards (population standard deviation).
        task_index: index of the group's task in the batch that started it.
        started_by_batch: id of the batch that started it; another batch if the group was carried over.
        weight_version: version named by the batch that started it.
    """

    group_id: str
    job_ids: list[str]
    rewards: list[float]
    mean: float
    std: float
    task_index: int
    started_by_batch: str
    weight_version: int | None


class SelectedGroups(_Wire):
    """Informative groups of a batch, in the order of their decision. Final once the batch is final."""

    state: BatchState
    groups: list[SelectedGroup]
