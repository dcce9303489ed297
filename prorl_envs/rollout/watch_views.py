"""What the dashboard shows of a service, as it crosses the wire."""

from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.rollout.batch_types import BatchView
from prorl_envs.rollout.types import JobState
from prorl_envs.rollout.views import NodeView, StatusView
from prorl_envs.viewer.summary import Summary


class _View(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SummaryPage(_View):
    """Results in short, in the order of their cursors.

    Args:
        next: cursor to ask for what comes after.
    """

    summaries: list[Summary]
    next: int


class SearchPage(_View):
    """A step of a search.

    Args:
        jobs: ids of those whose result has the text.
        next: cursor to go on with; the one that was asked for where nothing is left to look at.
    """

    jobs: list[str]
    next: int


class JobLine(_View):
    """An unfinished job.

    Args:
        state: queued, or the stage it is in.
        active: its stage runs; else it waits for it.
        attempts: how often it was started.
        since_s: seconds it has been so.
        turns, tokens: of its attempt so far; 0 also where another machine carries it out.
        node: where it is, "" for the service's own machine.
        memory_bytes: what its sandbox holds, as measured some seconds ago; None where nobody looked before,
            it has none, or it is elsewhere.
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
    """Unfinished jobs, those whose stage runs first.

    Args:
        total: how many there are, this page or not.
    """

    jobs: list[JobLine]
    total: int


class TokenTexts(_View):
    """The text of each token, by row of the trajectory, forks first."""

    rows: list[list[str]]


class LimitsRequest(_View):
    """What may happen at once on the service's own machine. What is not named stays as it is.

    Args:
        init, run, eval: jobs active in each stage.
        live: jobs that hold a sandbox.
        queue: jobs accepted and not finished.
        attempts: how often a job is tried.
    """

    init: int | None = Field(default=None, ge=1, le=100_000)
    run: int | None = Field(default=None, ge=1, le=100_000)
    eval: int | None = Field(default=None, ge=1, le=100_000)
    live: int | None = Field(default=None, ge=1, le=300_000)
    queue: int | None = Field(default=None, ge=1, le=10_000_000)
    attempts: int | None = Field(default=None, ge=1, le=10)


class Percentiles(_View):
    """Of some seconds: the median, the 90th and the 99th percentile, and how many were measured."""

    p50: float
    p90: float
    p99: float
    count: int


class Bucket(_View):
    """What ended in ten seconds: jobs by state, and the tokens that were sampled for them."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    sampled: int = 0


class SandboxesView(_View):
    """The sandboxes of the service's own machine.

    Args:
        open: not closed; `warm`: of these, those that stand ready; `busy`: the others.
        starting, waiting: those that start, and that wait for their turn to.
        starts_limit: most that may start at once; None where nothing speaks against more.
        given: given out so far; `from_pool`: of these, those that stood ready; `failed`: could not be had.
        ready_s: mean seconds from asking for one to having it.
        busy_bytes, warm_bytes: memory that those hold, as it counts towards their limits, measured some
            seconds ago; None where nobody looked before, or it cannot be told. `largest_bytes`: what the
            largest holds.
        memory_bytes, memory_used_bytes: of the machine; None where it does not say.
    """

    open: int
    warm: int
    busy: int
    starting: int
    waiting: int
    starts_limit: int | None
    given: int
    from_pool: int
    failed: int
    ready_s: float | None
    busy_bytes: int | None = None
    warm_bytes: int | None = None
    largest_bytes: int | None = None
    memory_bytes: int | None
    memory_used_bytes: int | None


class GroupLine(_View):
    """A group of which something ended lately, by its samples that have ended.

    Args:
        rewards: of these, None where there is none.
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
        attempts_limit: how often a job is tried.
        history: what ended, in buckets of ten seconds, oldest first; the last is not over.
        latency: seconds that jobs and calls took lately: `queued`, `init`, `run`, `eval`, `model_call`,
            `tools`.
        rewards: how many of the last results have a reward in each tenth from 0 to 1; below and above count
            to the first and last.
        reward_mean: of these.
        groups: the last of which something ended, newest first.
        running: jobs whose stage runs, the longest first, a few of them.
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
