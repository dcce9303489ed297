"""What the service answers besides results: the other half of the wire format."""

from typing import Any, Literal

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


class JobToken(_View):
    """A bearer token that is good for one job."""

    token: str


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
        protocol: what it speaks: vllm, sglang, llamacpp or openai; "" before that is found out.
        weight_version: of its weights, as it was last heard; "" where it is not known.
        turns: calls it was given.
        limit: calls it may have in flight, learnt from its complaints; None where there is no bound.
    """

    url: str
    in_flight: int
    sessions: int
    healthy: bool
    draining: bool
    protocol: str = ""
    weight_version: str = ""
    turns: int = 0
    limit: int | None = None


class ModelServerList(_View):
    """The model servers.

    Args:
        paused: weights are changing, and no turn begins.
    """

    servers: list[ModelServerView]
    paused: bool = False


class NodeView(_View):
    """A further machine that carries jobs out.

    Args:
        name: of the node; one that joins again has a number behind it.
        state: ready; draining: it finishes what it has; lost.
        reason: why it was lost, or "".
        pools: by stage; None for one that is lost.
        live, live_limit: jobs that hold a sandbox there.
        attempts: that have ended there, well or not.
        sandboxes: open there, when it was last heard of.
    """

    name: str
    state: str
    reason: str = ""
    pools: dict[str, PoolView] | None = None
    live: int = 0
    live_limit: int
    attempts: int
    sandboxes: int = 0


class NodeList(_View):
    """The nodes in the order in which they joined, then the last that were lost."""

    nodes: list[NodeView]


class RouterView(_View):
    """What the router of model calls has done since the start.

    Args:
        turns: calls that were routed.
        prompt_tokens: tokens of their prompts.
        expected_hit_rate: share of them that the chosen servers should have had in their caches, by the
            router's own books; None before there is any.
        told_hit_rate: the same as the servers tell it; None where none tells.
        moved: sessions that left a server for balance; `lost`: because it failed or was drained.
        spread: most calls in flight over the mean, of the servers that get work.
        paused: no turn begins, as weights are changing or there is no server yet; `paused_s`: seconds of
            that, all in all.
        waiting: there has been no model server yet, and turns are held until one is added.
    """

    turns: int
    prompt_tokens: int
    expected_hit_rate: float | None
    told_hit_rate: float | None
    moved: int
    lost: int
    spread: float
    paused: bool
    paused_s: float
    waiting: bool = False


class ModelServerRequest(_View):
    """A model server to add.

    Args:
        url: base URL, http or https.
        protocol: what it speaks; `auto` finds out whether vLLM's, SGLang's or llama.cpp's, None takes the
            service's setting. `openai` is a chat server without token ids, whose trajectories are not for
            training.
    """

    url: str = Field(min_length=8, max_length=2000, pattern=r"^https?://[^\s/?#@]+[^\s?#@]*$")
    protocol: Literal["auto", "vllm", "sglang", "llamacpp", "openai"] | None = None


class PauseRequest(_View):
    """Hold model calls while weights change.

    Args:
        mode: what becomes of calls in flight: `finish` lets them end, `abort` ends them and keeps what was
            sampled, `keep` freezes them in the server until it is resumed.
        resample: with `abort`, sample those turns anew instead of going on with them.
        wait_s: seconds to wait for calls in flight to end.
    """

    mode: Literal["finish", "abort", "keep"] = "finish"
    resample: bool = False
    wait_s: float = Field(default=0.0, ge=0, le=3600, allow_inf_nan=False)


class ResumeRequest(_View):
    """Let model calls go on.

    Args:
        weight_version: of the weights from now on; "" leaves it to the servers to say.
    """

    weight_version: str = Field(default="", max_length=200)


class ToldView(_View):
    """What came of telling a server.

    Args:
        supported: it has a way to be told.
        problem: why it did not work, or "".
    """

    url: str
    supported: bool
    problem: str = ""


class PauseView(_View):
    """How the model calls stand.

    Args:
        paused: no turn begins.
        in_flight: calls that servers still work on (or hold); after `finish` and `abort` the weights may
            change once it is 0.
        weight_version: what the last resume named.
        told: per server, what came of telling it.
    """

    paused: bool
    in_flight: int
    weight_version: str
    told: list[ToldView]


class StatusView(_View):
    """The service at one moment.

    Args:
        state: starting, serving, draining or stopped. Drained is draining with nothing unfinished.
        paused: `hold` where no stage starts, `finish` where no job begins, None where it is not paused.
        uptime_s: seconds since start.
        pools: by stage.
        live, live_limit: jobs and episodes that hold a sandbox.
        episodes: those that callers drive.
        unfinished, queue_limit: jobs accepted and not gone.
        finished: results since start, by state.
        failures: failed jobs since start, by kind.
        retries: attempts beyond the first.
        close_failures: sandboxes that did not close in order.
        internal_errors: bugs met; the log has them.
        newest: cursor of the newest result; 0 where there is none.
        router: of the model calls; None where the model is no pool of servers.
    """

    version: str
    state: str
    paused: str | None = None
    uptime_s: float
    pools: dict[str, PoolView]
    live: int
    live_limit: int
    episodes: int = 0
    unfinished: int
    queue_limit: int
    finished: dict[str, int]
    failures: dict[str, int]
    retries: int
    close_failures: int
    internal_errors: int
    newest: int
    model_servers: list[ModelServerView]
    router: RouterView | None = None


class EnvironmentView(_View):
    """A family of tasks.

    Args:
        task_schema: the JSON schema of its rows.
        about: what it is, in a line.
        limits, sampling: what a request gets that names none, where that is not the service's own default.
    """

    name: str
    task_schema: dict[str, Any]
    about: str = ""
    limits: dict[str, Any] = Field(default_factory=dict)
    sampling: dict[str, Any] = Field(default_factory=dict)


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
