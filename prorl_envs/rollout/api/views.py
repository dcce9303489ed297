"""Responses of the service other than results."""

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from prorl_envs.errors import FailureKind
from prorl_envs.model.types import ServerHealth
from prorl_envs.rollout.api.types import GroupStatistics, JobState, Result, WireModel


class JobView(WireModel):
    """State of a job.

    Args:
        attempts: number of attempts so far, 0 before the first.
        reward, failure, cursor: fields of the result, once it exists.
    """

    id: str
    group_id: str
    sample: int
    state: JobState
    attempts: int
    reward: float | None = None
    failure: FailureKind | None = None
    cursor: int | None = None


class GroupView(WireModel):
    """State of a group.

    Args:
        jobs: one per sample.
        complete: every job has a result.
        statistics: statistics of the rewards; None until the group is complete.
        batch_id: the batch that the group counts for, if any.
    """

    id: str
    environment: str
    task_id: str
    jobs: list[JobView]
    complete: bool
    statistics: GroupStatistics | None
    batch_id: str | None = None


class GroupList(WireModel):
    """Groups, in the order of the request."""

    groups: list[GroupView]


class ResultPage(WireModel):
    """Results in the order of their cursors.

    Args:
        next: cursor for the next request; equal to the requested cursor if there were no results.
    """

    results: list[Result]
    next: int


class AcknowledgeRequest(WireModel):
    """Request to mark results as read.

    Args:
        after: mark only results after this cursor.
        up_to: mark only results up to and including this cursor; by default there is no upper bound.
        groups, environments, states: mark only results with these values; an empty list accepts all.
    """

    after: int = Field(default=0, ge=0, le=2**63 - 1)
    up_to: int = Field(default=2**63 - 1, ge=0, le=2**63 - 1)
    groups: list[str] = Field(default=[], max_length=1000)
    environments: list[str] = Field(default=[], max_length=100)
    states: list[Literal["done", "failed", "cancelled"]] = Field(default=[], max_length=3)


class PoolView(WireModel):
    """Pool of one stage: active jobs, the limit of active jobs, waiting jobs."""

    limit: int
    active: int
    waiting: int


class LoginView(WireModel):
    """One-time login link for a browser: path and query, below the service's URL."""

    path: str


class ModelServerView(WireModel):
    """Model server.

    Args:
        in_flight: number of calls that the server is answering.
        sessions: number of rollouts pinned to the server.
        state: `unknown` until its first answer; `healthy` after an answer; `failing` after a failure;
            `draining` once it receives no further turns.
        problem: reason why the server is failing, or "".
        protocol: vllm, sglang, llamacpp or openai; "" until the protocol is detected.
        weight_version: last known version of the server's weights; "" if unknown.
        turns: number of calls that the server has received.
        limit: maximum number of calls in flight, learnt from the server's overload errors; None: no limit.
    """

    url: str
    in_flight: int
    sessions: int
    state: ServerHealth
    problem: str = ""
    protocol: str = ""
    weight_version: str = ""
    turns: int = 0
    limit: int | None = None


class ModelServerList(WireModel):
    """List of the model servers.

    Args:
        paused: no turn starts, because weights are changing.
    """

    servers: list[ModelServerView]
    paused: bool = False


class NodeView(WireModel):
    """Node: a further machine that runs jobs.

    Args:
        name: name of the node; a node that joins again gets a number as suffix.
        state: ready, draining (the node only finishes its jobs) or lost.
        reason: reason why the node was lost, or "".
        pools: pools by stage; None if the node is lost.
        jobs_with_sandbox, max_jobs_with_sandbox: jobs that hold a sandbox on the node, and their limit.
        attempts: attempts that finished or failed on the node.
        sandboxes: open sandboxes, as of the last heartbeat.
    """

    name: str
    state: str
    reason: str = ""
    pools: dict[str, PoolView] | None = None
    jobs_with_sandbox: int = 0
    max_jobs_with_sandbox: int
    attempts: int
    sandboxes: int = 0


class NodeList(WireModel):
    """Connected nodes in the order in which they joined, then the nodes that were lost last."""

    nodes: list[NodeView]


class RouterView(WireModel):
    """Statistics of the router of model calls since the start.

    Args:
        turns: number of calls that were routed.
        prompt_tokens: number of tokens in their prompts.
        expected_hit_rate: share of the prompt tokens that should have been in the caches of the chosen
            servers, according to the router's records; None before the first call.
        reported_hit_rate: the same share as reported by the servers; None if no server reports it.
        rebalanced: number of sessions that changed servers for load balance; `failed_over`: number of
            sessions that changed servers because a server failed or was drained.
        load_imbalance: calls in flight of the busiest server, divided by the mean of all servers that receive
            work.
        paused: no turn starts, because weights are changing or there is no server yet; `paused_s`: total
            seconds for which turns were held.
        waiting: no model server was ever added; turns are held until one is added.
    """

    turns: int
    prompt_tokens: int
    expected_hit_rate: float | None
    reported_hit_rate: float | None
    rebalanced: int
    failed_over: int
    load_imbalance: float
    paused: bool
    paused_s: float
    waiting: bool = False


class ModelServerRequest(WireModel):
    """Request to add a model server.

    Args:
        url: base URL, http or https.
        protocol: `auto` detects the protocol of vLLM, SGLang or llama.cpp; None takes the service's setting.
            `openai` is a chat server that returns no token ids, so its trajectories cannot be trained on.
    """

    url: str = Field(min_length=8, max_length=2000, pattern=r"^https?://[^\s/?#@]+[^\s?#@]*$")
    protocol: Literal["auto", "vllm", "sglang", "llamacpp", "openai"] | None = None


class PauseRequest(WireModel):
    """Request to hold model calls while weights change.

    Args:
        mode: handling of calls in flight: `finish` lets them finish, `abort` aborts them and keeps the
            sampled tokens, `keep` freezes them in the server until it resumes.
        resample: with `abort`, sample the aborted turns anew instead of continuing them.
        wait_s: seconds to wait for calls in flight to finish.
    """

    mode: Literal["finish", "abort", "keep"] = "finish"
    resample: bool = False
    wait_s: float = Field(default=0.0, ge=0, le=3600, allow_inf_nan=False)


class ResumeRequest(WireModel):
    """Request to resume model calls.

    Args:
        weight_version: version of the weights from now on; "" takes the version that the servers report.
    """

    weight_version: str = Field(default="", max_length=200)


class ServerAckView(WireModel):
    """Acknowledgement of a pause or resume by one model server.

    Args:
        supported: the server supports such requests.
        problem: reason for a failure, or "".
    """

    url: str
    supported: bool
    problem: str = ""


class PauseView(WireModel):
    """State of a pause of model calls.

    Args:
        paused: no turn starts.
        in_flight: number of calls that servers still process or hold. After a pause with `finish` or `abort`,
            the weights may change once this number is 0.
        weight_version: weight version in the last resume request.
        acknowledgements: one for each server.
    """

    paused: bool
    in_flight: int
    weight_version: str
    acknowledgements: list[ServerAckView]


class StatusView(WireModel):
    """Current state of the service.

    Args:
        state: starting, serving, draining or stopped. Draining is complete when `unfinished` is 0.
        paused: `hold`: no stage starts; `finish`: no job starts; None: not paused.
        uptime_s: seconds since start.
        pools: pools by stage.
        jobs_with_sandbox: number of jobs and interactive episodes that hold a sandbox;
            `max_jobs_with_sandbox`: their limit.
        episodes: number of interactive episodes.
        unfinished: number of accepted jobs that have no result or whose sandbox is not closed;
            `queue_limit`: their limit.
        finished: number of results since start, by state.
        failures: number of failed jobs since start, by kind.
        retries: number of attempts beyond each job's first.
        close_failures: number of sandboxes that failed to close.
        internal_errors: number of errors caused by bugs; the log has the details.
        newest_cursor: cursor of the newest result; 0 if there is none.
        router: statistics of the router; None if the model is not a pool of servers.
    """

    version: str
    state: str
    paused: str | None = None
    uptime_s: float
    pools: dict[str, PoolView]
    jobs_with_sandbox: int
    max_jobs_with_sandbox: int
    episodes: int = 0
    unfinished: int
    queue_limit: int
    finished: dict[str, int]
    failures: dict[str, int]
    retries: int
    close_failures: int
    internal_errors: int
    newest_cursor: int
    model_servers: list[ModelServerView]
    router: RouterView | None = None


class EnvironmentView(WireModel):
    """Environment: a family of tasks.

    Args:
        task_schema: JSON schema of the environment's data rows.
        description: one line of text.
        limits, sampling: the environment's own defaults, for fields that a request does not set.
    """

    name: str
    task_schema: dict[str, Any]
    description: str = ""
    limits: dict[str, Any] = Field(default_factory=dict)
    sampling: dict[str, Any] = Field(default_factory=dict)


class EnvironmentList(WireModel):
    environments: list[EnvironmentView]


class Health(WireModel):
    status: str


class ErrorDetail(WireModel):
    """Error.

    Args:
        type: a name in `rollout.api.errors.WIRE_ERRORS`.
        message: description of the problem; `hint`: remedy.
    """

    type: str
    message: str
    hint: str = ""


class ErrorBody(WireModel):
    """Body of every unsuccessful response."""

    error: ErrorDetail


class Pause(StrEnum):
    """Mode of a scheduler pause."""

    HOLD = "hold"  # no stage starts: running stages finish, and their jobs wait
    FINISH = "finish"  # no INIT starts: started jobs run to completion
