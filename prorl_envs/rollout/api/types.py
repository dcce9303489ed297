"""Requests and results of the rollout service. Result format version 2.

A job runs one episode; a group is n jobs of one task. These models are the wire format of the HTTP API and
the line format of stored trajectories.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from prorl_envs.errors import FailureKind
from prorl_envs.model.types import Sampling, VersionSpan
from prorl_envs.strict_json import json_problem

RESULT_VERSION: Literal[2] = 2

#: Part of an id: not empty, and not `.` or `..`, which clients and proxies remove from a path.
ID_PART = r"(?:\.?[A-Za-z0-9_:\-][A-Za-z0-9._:\-]*|\.\.[A-Za-z0-9._:\-]+)"
_ID = rf"^[A-Za-z0-9][A-Za-z0-9._:\-]*(?:/{ID_PART})*$"
JobId = Annotated[str, Field(min_length=1, max_length=200, pattern=_ID)]
#: Shorter than a job id, because a batch's groups are called `<id>/<index>`.
BatchId = Annotated[str, Field(min_length=1, max_length=180, pattern=_ID)]

#: Lease in seconds. It must be longer than the client's pause between two requests.
Lease = Annotated[float | None, Field(ge=1, le=86_400)]


class WireModel(BaseModel):
    """Base of requests and responses."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    # The text of the problem is not shown: it may quote characters that UTF-8 cannot encode.
    if json_problem(value):
        raise ValueError("not JSON: it contains a NaN, an infinity or a lone surrogate")
    return value


#: Object that can be sent as JSON.
JsonFields = Annotated[dict[str, Any], AfterValidator(_check_json)]


def job_id(group_id: str, sample: int) -> str:
    """Return the id of a group's sample."""
    return f"{group_id}/{sample}"


def split_job_id(job: str) -> tuple[str, int]:
    """Return the group id and sample of a job id, or ("", -1) if it is not a job id."""
    group_id, _, sample = job.rpartition("/")
    # One spelling per job: no "g/01", no digits of other scripts.
    if not (sample.isascii() and sample.isdecimal() and len(sample) < 10 and str(int(sample)) == sample):
        return "", -1
    return group_id, int(sample)


class Stage(StrEnum):
    INIT = "init"
    RUN = "run"
    EVAL = "eval"


class JobState(StrEnum):
    """State of a job. The last three are final."""

    QUEUED = "queued"
    INIT = "init"
    RUN = "run"
    EVAL = "eval"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


class StopReason(StrEnum):
    """Reason why the agent loop stopped. A job is graded whatever the reason."""

    FINISHED = "finished"
    NO_TOOL_CALL = "no_tool_call"
    MALFORMED = "malformed"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    TIME_LIMIT = "time_limit"
    LOOP = "loop"


class AgentLimits(WireModel):
    """Limits of the agent loop.

    Args:
        max_turns: maximum number of model calls.
        max_tokens: maximum number of tokens in the context, including the prompt.
        max_malformed: consecutive answers without a readable tool call after which the loop stops.
        max_repeats: the loop stops after this number of consecutive turns with the same calls and outcomes,
            or this number of alternations between two such turns; 0 means no limit.
        max_observation_chars: longer observations are cut in the middle; None never cuts them.
        reserve_tokens: part of `max_tokens` that is reserved for the final turns. Before the context grows
            into this part, the last observations are cut to fit, and the model is asked once to finish.
            0 disables both.
        tool_timeout_s: timeout of one tool call in seconds.
        init_s, run_s, eval_s: maximum active seconds of each stage. Time in a queue does not count.
    """

    max_turns: int = Field(default=30, ge=1, le=1000)
    max_tokens: int = Field(default=32_768, ge=16, le=4_000_000)
    max_malformed: int = Field(default=3, ge=1, le=100)
    max_repeats: int = Field(default=0, ge=0, le=100)
    max_observation_chars: int | None = Field(default=None, ge=200, le=4_000_000)
    reserve_tokens: int = Field(default=0, ge=0, le=1_000_000)
    tool_timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    init_s: float = Field(default=600.0, gt=0, le=86_400)
    run_s: float = Field(default=1800.0, gt=0, le=86_400)
    eval_s: float = Field(default=900.0, gt=0, le=86_400)


class StartingTurns(WireModel):
    """Turns of another job with which the samples of a group start.

    Args:
        job_id: the job, which may still run. Its turns must be in one row of exact tokens.
        turns: number of its turns. Their tool calls run again in the new sandbox. If a result differs, the
            samples go on from there.
    """

    job_id: JobId
    turns: int = Field(ge=1, le=1000)


class GroupRequest(WireModel):
    """Request for `samples` jobs of one task.

    Args:
        id: the caller's id of the group; submitting the same request again has no further effect.
        environment: name of a registered environment family.
        task: one data row of that family.
        samples: number of jobs; job ids are `<group id>/<index>`.
        lease_s: seconds without a request about the group after which its unfinished jobs are cancelled. A
            request that names the group renews the lease. The lease does not expire while such a request
            waits for its response. None: the jobs run to completion without a client.
        branch_at: number of turns that the samples share. Sample 0 takes them; the others go on from there,
            each in a copy of its sandbox. 0: every sample starts with its own first turn.
        start: turns of an earlier job that come before those of the samples. None: there are none.
    """

    id: JobId
    environment: str = Field(min_length=1, max_length=100)
    task: JsonFields
    samples: int = Field(default=1, ge=1, le=1024)
    sampling: Sampling = Sampling()
    limits: AgentLimits = AgentLimits()
    lease_s: Lease = None
    branch_at: int = Field(default=0, ge=0, le=1000)
    start: StartingTurns | None = None
    metadata: JsonFields = Field(default_factory=dict)

    @property
    def job_ids(self) -> list[str]:
        return [job_id(self.id, sample) for sample in range(self.samples)]


class BranchRequest(WireModel):
    """Request for groups that start with the first turns of a job, one group for each place.

    Args:
        turns: numbers of turns to start with; or `policy`, to choose `points` places in a finished job:
            `evenly`, `after_failure` of a tool call, or `high_entropy`, before the turns whose tokens had the
            lowest mean log-probability.
        samples: number of jobs of each group.
    """

    turns: list[Annotated[int, Field(ge=1, le=1000)]] = Field(default=[], max_length=1000)
    policy: Literal["evenly", "after_failure", "high_entropy"] | None = None
    points: int = Field(default=1, ge=1, le=1000)
    samples: int = Field(default=1, ge=1, le=1024)

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        if bool(self.turns) == (self.policy is not None):
            raise ValueError("give either turns or policy")
        return self


class Failure(WireModel):
    """Reason why there is no reward.

    Args:
        kind: the boundary that failed.
        stage: stage of the job at the failure.
        message: description of the failure; `hint`: remedy.
        retryable: another attempt may succeed.
    """

    kind: FailureKind
    stage: Stage
    message: str
    hint: str = ""
    retryable: bool = False


class TurnRecord(WireModel):
    """One model call within the trajectory.

    Args:
        start: index of the turn's first sampled token in the trajectory's `ids`.
        end: index after the turn's last sampled token.
        finish_reason: stop, length or abort.
        weight_version: version of the weights that sampled the turn, the oldest if there were several; ""
            if unknown.
        server: base URL of the server that sampled the turn.
        model_s: seconds of the model call, without the time for which the call was held while weights
            changed; `tools_s`: seconds of the tool calls that followed.
        version_spans: if several versions sampled the turn, the span of each version, as indices relative to
            `start`.
        cached_tokens: prompt tokens that the server found in its cache; None if it does not report them.
        failed_calls: number of tool calls that followed and failed, or whose command or cell failed.
        token_exact: False if the server returned text, so that the ids are only a tokenisation of this text.
    """

    start: int
    end: int
    finish_reason: str
    weight_version: str
    server: str
    model_s: float
    tools_s: float
    version_spans: list[VersionSpan] = Field(default_factory=list)
    cached_tokens: int | None = None
    failed_calls: int = 0
    token_exact: bool = True


class Trajectory(WireModel):
    """Row of the token ledger: exactly the tokens that the model read and wrote. Most episodes are one row.

    Args:
        ids: all token ids in order, shape [T].
        loss_mask: 1 for tokens that the policy sampled, else 0, shape [T]. All 0 in a turn that is not exact.
        logprobs: log-probability of each sampled token, 0.0 if the mask is 0, shape [T].
        turns: the model calls, as spans of `ids`.
        drift: number of tokens by which prompts sent to a server differed from the recorded ids. It is zero
            by construction, and counted to detect bugs.
        token_exact: the ids are exactly the ids that the model read and sampled. False if a server returned
            text: then the row must not be trained on, and `mask_sample` is set.
        parent: index in `Result.rows` of the row that this row branched off from, if a harness rewrote the
            history. The first `shared_prefix_len` ids are copies of that row's ids, and are trained on in
            that row only. The same holds for rows in `Result.unfinished_answers`. If the episode branched off
            from another job's (`Result.branch`), they are copies of the ids of its row.
    """

    ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    turns: list[TurnRecord]
    drift: int = 0
    token_exact: bool = True
    parent: int | None = None
    shared_prefix_len: int = 0


class Timings(WireModel):
    """Seconds that a job was active or waited.

    Args:
        queued_s: seconds that the job waited for its stages.
        init_s, run_s, eval_s: active seconds of each stage.
        model_s, tools_s: seconds of model calls and of tool calls; parts of `run_s`.
        held_s: seconds for which turns were held while weights changed; not part of the other fields.
    """

    queued_s: float = 0.0
    init_s: float = 0.0
    run_s: float = 0.0
    eval_s: float = 0.0
    model_s: float = 0.0
    tools_s: float = 0.0
    held_s: float = 0.0


class BranchOrigin(WireModel):
    """Place where an episode branched off from another one.

    Args:
        job_id: the other job.
        turns: number of turns that the other job took.
        lost: what its sandbox had and this one has not, such as background processes.
    """

    job_id: str
    turns: int
    lost: list[str]


class Result(WireModel):
    """Result of one job. `reward` is a number only if a grader returned it.

    Args:
        version: version of this format.
        cursor: position in the sequence of the service's results; strictly increasing.
        job_id, group_id, sample, environment, task_id: identify the job.
        batch_id: the batch that started the group, if any; a later batch may have taken the group over.
        state: done, failed or cancelled.
        reward: the grader's number; None unless `state` is done.
        mask_sample: True if a trainer must leave this sample out of the loss.
        stop_reason: reason why the agent loop stopped; None if it did not stop by itself.
        failure: reason why there is no reward; None if there is a reward.
        components, evidence: details of the grade.
        messages: the conversation as chat messages. The tokens in `trajectory` are authoritative.
        forks: rows of the same episode that came before `trajectory`, if its history was rewritten
            (`service.reasoning`). Each row is a training sequence of its own. All rows share one reward, so a
            loss should be normalised per episode.
        unfinished_answers: context and sampled tokens of each answer that a harness did not wait for, if the
            model server reported them. The turn's `finish_reason` is abort. They are not part of `rows`: the
            trainer decides whether to train on them.
        tools: the available tools, in OpenAI's function format.
        branch: where the episode branched off from another job's (`GroupRequest.branch_at`, `start`), or
            None.
        attempts: number of attempts; 0 if the job was cancelled before the first attempt.
    """

    version: Literal[2] = RESULT_VERSION
    cursor: int = 0
    job_id: str
    group_id: str
    sample: int
    environment: str
    task_id: str
    batch_id: str | None = None
    state: JobState
    reward: float | None
    mask_sample: bool
    stop_reason: StopReason | None
    failure: Failure | None
    components: dict[str, float] = Field(default_factory=dict)
    evidence: dict[str, Any] = Field(default_factory=dict)
    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    trajectory: Trajectory | None = None
    forks: list[Trajectory] = Field(default_factory=list)
    unfinished_answers: list[Trajectory] = Field(default_factory=list)
    timings: Timings = Timings()
    branch: BranchOrigin | None = None
    attempts: int = 1
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def rows(self) -> list[Trajectory]:
        """Rows for training: the forks, then the trajectory."""
        return [*self.forks, *([self.trajectory] if self.trajectory else [])]


class GroupStatistics(WireModel):
    """Statistics of a finished group's rewards.

    Args:
        rewards: one per sample, None if the sample has no reward.
        mean, std: mean and population standard deviation of the rewards.
        informative: the rewards differ, so the group has a gradient (DAPO's filter).
        failures: number of samples by failure kind.
    """

    group_id: str
    task_id: str
    environment: str
    rewards: list[float | None]
    mean: float | None
    std: float | None
    informative: bool
    failures: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Filter for results. An empty set accepts every value.

    Args:
        groups: ids of groups.
        environments: names of environments.
        states: final states.
        prefix: prefix of the group ids.
    """

    groups: frozenset[str] = frozenset()
    environments: frozenset[str] = frozenset()
    states: frozenset[JobState] = frozenset()
    prefix: str = ""

    def __contains__(self, result: Result) -> bool:
        return self.accepts(result.group_id, result.environment, result.state)

    def accepts(self, group_id: str, environment: str, state: JobState) -> bool:
        """Return True if the filter accepts a result with these values."""
        return (
            (not self.groups or group_id in self.groups)
            and group_id.startswith(self.prefix)
            and (not self.environments or environment in self.environments)
            and (not self.states or state in self.states)
        )


#: Filter that accepts every result.
ALL = Selection()
