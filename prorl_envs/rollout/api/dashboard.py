"""Wire types of the dashboard."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.rollout.api.batches import BatchView
from prorl_envs.rollout.api.types import JobState
from prorl_envs.rollout.api.views import NodeView, StatusView
from prorl_envs.viewer.summary import Summary


class _View(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SummaryPage(_View):
    """Result summaries, in the order of their cursors.

    Args:
        next: cursor for the next request.
    """

    summaries: list[Summary]
    next: int


class SearchPage(_View):
    """One step of a search.

    Args:
        jobs: ids of the jobs whose result contains the text.
        next: cursor for the next step; equal to the requested cursor if the search is complete.
    """

    jobs: list[str]
    next: int


class JobLine(_View):
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


class JobPage(_View):
    """Unfinished jobs; jobs whose stage is running come first.

    Args:
        total: number of unfinished jobs, including those not on this page.
    """

    jobs: list[JobLine]
    total: int


class TokenTexts(_View):
    """Text of each token, by row of the trajectory, forks first."""

    rows: list[list[str]]


class MarkdownTrees(_View):
    """Parsed texts.

    Args:
        messages: for each message, the tree of each part of its content; None for a part that is shown
            unparsed. A tree is a list of texts and elements: `[name, children]` or `[name, children, value]`.
    """

    messages: list[list[list[Any] | None]]


class LimitsRequest(_View):
    """Limits of concurrent work on the service's own machine. Missing fields keep their value.

    Args:
        init, run, eval: active jobs of each stage.
        max_jobs_with_sandbox: jobs with a sandbox.
        queue: jobs accepted and not finished.
        attempts: most attempts of a job.
    """

    init: int | None = Field(default=None, ge=1, le=100_000)
    run: int | None = Field(default=None, ge=1, le=100_000)
    eval: int | None = Field(default=None, ge=1, le=100_000)
    max_jobs_with_sandbox: int | None = Field(default=None, ge=1, le=300_000)
    queue: int | None = Field(default=None, ge=1, le=10_000_000)
    attempts: int | None = Field(default=None, ge=1, le=10)


class Percentiles(_View):
    """Median, 90th and 99th percentile of durations in seconds, and the number of measurements."""

    p50: float
    p90: float
    p99: float
    count: int


class Bucket(_View):
    """Work that finished within ten seconds: jobs by state, and the tokens that were sampled for them."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    sampled: int = 0


class SandboxesView(_View):
    """Sandboxes of the service's own machine.

    Args:
        open: sandboxes that are not closed; `warm`: those in the warm pool; `busy`: the others.
        starting, waiting: sandboxes that are starting, and those that wait for their start.
        handed_out: sandboxes handed out so far; `from_pool`: those from the warm pool; `failed`: failed
            requests.
        ready_s: mean seconds from the request of a sandbox until it is ready.
        busy_bytes, warm_bytes: memory of these sandboxes as it counts towards their limits, measured some
            seconds ago; None if it was not measured yet or is unknown. `largest_bytes`: memory of the largest
            sandbox.
        memory_bytes, memory_used_bytes: of the machine; None if unknown.
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


class GroupLine(_View):
    """Group with a recently finished sample; contains only the finished samples.

    Args:
        rewards: one per finished sample, None if it has no reward.
    """

    id: str
    environment: str
    task_id: str
    rewards: list[float | None]
    mean: float | None
    std: float | None


class DashboardView(_View):
    """The service at one moment, and its last ten minutes.

    Args:
        time: seconds since 1970.
        attempts_limit: most attempts of a job.
        history: finished work in buckets of ten seconds, oldest first; the last bucket is still filling.
        latency: seconds that recent jobs and calls took: `queued`, `init`, `run`, `eval`, `model_call`,
            `tools`.
        rewards: number of recent results with a reward in each tenth from 0 to 1; rewards below 0 and above 1
            count to the first and last.
        reward_mean: mean of these rewards.
        groups: groups with a recently finished sample, newest first.
        running: a few of the jobs whose stage is running, the longest first.
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
