"""What the service answers besides results: the other half of the wire format."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.errors import FailureKind
from prorl_envs.rollout.types import GroupStatistics, JobState, Result


class _View(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class JobView(_View):
    """Where a job is.

    Args:
        attempts: how often it was started, 0 while it waits for the first time.
        reward, failure, cursor: of the result, once there is one.
    """

    id: str
    group_id: str
    sample: int
    state: JobState
    attempts: int
    reward: float | None = None
    failure: FailureKind | None = None
    cursor: int | None = None


class GroupView(_View):
    """Where a group is.

    Args:
        jobs: one per sample.
        complete: every job has a result.
        statistics: of the rewards; None until the group is complete.
        batch_id: the batch that it counts for, if any.
    """

    id: str
    environment: str
    task_id: str
    jobs: list[JobView]
    complete: bool
    statistics: GroupStatistics | None
    batch_id: str | None = None


class GroupList(_View):
    """Groups, in the order in which they were asked for."""

    groups: list[GroupView]


class ResultPage(_View):
    """Results in the order of their cursors.

    Args:
        next: cursor to ask for what comes after; the cursor asked for where there was nothing.
    """

    results: list[Result]
    next: int


class PoolView(_View):
    """One stage's pool: jobs active, the most there may be, jobs waiting."""

    limit: int
    active: int
    waiting: int


class ModelServerView(_View):
    """A model server.

    Args:
        in_flight: calls it is answering now.
        sessions: rollouts pinned to it.
        healthy: it did not fail last.
        draining: it gets nothing more.
    """

    url: str
    in_flight: int
    sessions: int
    healthy: bool
    draining: bool


class ModelServerList(_View):
    servers: list[ModelServerView]


class ModelServerRequest(_View):
    """A model server to add.

    Args:
        url: base URL, http or https.
    """

    url: str = Field(min_length=8, max_length=2000, pattern=r"^https?://[^\s/?#@]+[^\s?#@]*$")


class StatusView(_View):
    """The service at one moment.

    Args:
        state: starting, serving, draining or stopped.
        uptime_s: seconds since start.
        pools: by stage.
        live, live_limit: jobs that hold a sandbox.
        unfinished, queue_limit: jobs accepted and not gone.
        finished: results since start, by state.
        failures: failed jobs since start, by kind.
        retries: attempts beyond the first.
        close_failures: sandboxes that did not close in order.
        internal_errors: bugs met; the log has them.
    """

    version: str
    state: str
    uptime_s: float
    pools: dict[str, PoolView]
    live: int
    live_limit: int
    unfinished: int
    queue_limit: int
    finished: dict[str, int]
    failures: dict[str, int]
    retries: int
    close_failures: int
    internal_errors: int
    model_servers: list[ModelServerView]


class EnvironmentView(_View):
    """A family of tasks: the JSON schema of its rows."""

    name: str
    task_schema: dict[str, Any]


class EnvironmentList(_View):
    environments: list[EnvironmentView]


class Health(_View):
    status: str


class ErrorDetail(_View):
    """An error.

    Args:
        type: its name, from a closed list.
        message: what is wrong; `hint`: what to do about it.
    """

    type: str
    message: str
    hint: str = ""


class ErrorBody(_View):
    """The body of every answer that is not a success."""

    error: ErrorDetail
