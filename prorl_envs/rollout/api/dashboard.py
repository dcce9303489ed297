"""Wire types of the dashboard."""

from typing import Any

from pydantic import Field

from prorl_envs.rollout.api.batches import BatchView
from prorl_envs.rollout.api.summary import Summary
from prorl_envs.rollout.api.types import JobState, WireModel
from prorl_envs.rollout.api.views import NodeView, StatusView


class SummaryPage(WireModel):
    """Result summaries, in the order of their cursors.

    Args:
        next: cursor for the next request.
    """

    summaries: list[Summary]
    next: int


class SearchPage(WireModel):
    """One step of a search.

    Args:
        jobs: ids of the jobs whose result contains the text.
        next: cursor for the next step; equal to the requested cursor if the search is complete.
    """

    jobs: list[str]
    next: int


class JobLine(WireModel):
    """Unfinished job.

    Args:
        state: queued, or the current stage.
        active: the stage is running; False if the job waits for the stage.
        attempts: number of attempts so far.
        since_s: seconds since the last change of `state` or `active`.
        turns, tokens: counts of the current attempt; 0 also if the job runs on another machine.
        node: name of the node, "" for the service's own machine.
        memory_bytes: memory of the job's sandbox, as measured some seconds ago; None if it was not measured
            yet, the job has no sandbox, or the sandbox is on another machine.
    """

    id: str
    group_id: str
    environment: str
    task_id: str
    state: JobState
    active: bool
    attempts: int
    since_s: float
    turns: int = 0
    tokens: int = 0
    node: str = ""
    memory_bytes: int | None = None


class JobPage(WireModel):
    """Unfinished jobs. Jobs with a running stage come first.

    Args:
        total: number of unfinished jobs, including jobs that are not on this page.
    """

    jobs: list[JobLine]
    total: int


class TokenTexts(WireModel):
    """Text of each token, by row of the trajectory, forks first."""

    rows: list[list[str]]


class MarkdownTrees(WireModel):
    """Parsed texts.

    Args:
        messages: for each message, the tree of each part of its content; None for a part that is shown
            unparsed. A tree is a list of texts and elements: `[name, children]` or `[name, children, value]`.
    """

    messages: list[list[list[Any] | None]]


class LimitsRequest(WireModel):
    """Limits of concurrent work on the service's own machine. Missing fields keep their value.

    Args:
        init, run, eval: maximum number of active jobs in each stage.
        max_jobs_with_sandbox: maximum number of jobs with a sandbox.
        queue: maximum number of unfinished jobs.
        attempts: maximum number of attempts of a job.
    """

    init: int | None = Field(default=None, ge=1, le=100_000)
    run: int | None = Field(default=None, ge=1, le=100_000)
    eval: int | None = Field(default=None, ge=1, le=100_000)
    max_jobs_with_sandbox: int | None = Field(default=None, ge=1, le=300_000)
    queue: int | None = Field(default=None, ge=1, le=10_000_000)
    attempts: int | None = Field(default=None, ge=1, le=10)


class Percentiles(WireModel):
    """Median, 90th and 99th percentile of durations in seconds, and the number of measurements."""

    p50: float
    p90: float
    p99: float
    count: int


class Bucket(WireModel):
    """Jobs that finished within ten seconds: their number by state, and their sampled tokens."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    sampled: int = 0


class SandboxesView(WireModel):
    """Sandboxes of the service's own machine.

    Args:
        open: sandboxes that are not closed; `warm`: those in the warm pool; `busy`: all other sandboxes.
        starting: sandboxes that are starting; `waiting`: sandboxes whose start waits for other starts.
        handed_out: sandboxes handed out so far; `from_pool`: number of these that came from the warm pool;
            `failed`: requests for a sandbox that failed.
        ready_s: mean seconds from the request for a sandbox until it is ready.
        busy_bytes, warm_bytes: memory of these sandboxes that counts towards their limits, measured some
            seconds ago; None if it is unknown or not measured yet. `largest_bytes`: memory of the largest
            sandbox.
        memory_bytes, memory_used_bytes: total and used memory of the machine; None if unknown.
    """

    open: int
    warm: int
    busy: int
    starting: int
    waiting: int
    handed_out: int
    from_pool: int
    failed: int
    ready_s: float | None
    busy_bytes: int | None = None
    warm_bytes: int | None = None
    largest_bytes: int | None = None
    memory_bytes: int | None
    memory_used_bytes: int | None


class GroupLine(WireModel):
    """Finished samples of a group, of which at least one finished recently.

    Args:
        rewards: one per finished sample, None if it has no reward.
    """

    id: str
    environment: str
    task_id: str
    rewards: list[float | None]
    mean: float | None
    std: float | None


class DashboardView(WireModel):
    """Current state of the service, and its finished jobs of the last ten minutes.

    Args:
        time: seconds since 1970.
        attempts_limit: maximum number of attempts of a job.
        history: finished jobs in buckets of ten seconds, oldest first. The last bucket is not complete yet.
        latency: seconds that recent jobs and calls took, by name: `queued`, `init`, `run`, `eval`,
            `model_call`, `tools`.
        rewards: histogram of recent rewards: ten equal intervals from 0 to 1. Rewards below 0 count in the
            first interval, rewards above 1 in the last.
        reward_mean: mean of these rewards.
        groups: groups with a recently finished sample, newest first.
        running: some of the jobs with a running stage, the longest-running first.
    """

    time: float
    status: StatusView
    attempts_limit: int
    sandboxes: SandboxesView
    history: list[Bucket]
    latency: dict[str, Percentiles]
    rewards: list[int]
    reward_mean: float | None
    groups: list[GroupLine]
    batches: list[BatchView]
    nodes: list[NodeView]
    running: list[JobLine]
