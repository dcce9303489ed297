"""The vocabulary of the rollout service: what is asked for, what comes back. Result format version 1.

A job is one episode; a group is n jobs of one task. These models are the wire format of the HTTP API and
the line format of stored trajectories.
"""

import json
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from prorl_envs.errors import FailureKind
from prorl_envs.policy.types import Sampling, VersionSpan

RESULT_VERSION: Literal[1] = 1

_ID = r"^[A-Za-z0-9][A-Za-z0-9._:/\-]*$"
JobId = Annotated[str, Field(min_length=1, max_length=200, pattern=_ID)]
#: Shorter, since a batch's groups are called `<id>/<index>`.
BatchId = Annotated[str, Field(min_length=1, max_length=180, pattern=_ID)]


#: Seconds without a sign of whoever asked; more than a client may take between two requests.
Lease = Annotated[float | None, Field(ge=1, le=86_400)]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def json_problem(value: object) -> str:
    """Why `value` cannot travel as JSON in UTF-8 (NaN, a lone surrogate, an object), or nothing."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        return str(error)
    return ""


def checked_json(value: dict[str, Any]) -> dict[str, Any]:
    """The value itself. For validators: raises ValueError where it cannot travel as JSON."""
    if json_problem(value):  # whose words may quote what UTF-8 cannot carry
        raise ValueError("not JSON: a NaN, an infinity or a lone surrogate is in it")
    return value


def job_id(group_id: str, sample: int) -> str:
    """The id of a group's sample."""
    return f"{group_id}/{sample}"


def split_job_id(job: str) -> tuple[str, int]:
    """Group id and sample of a job id; ("", -1) where it is none."""
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
    """Where a job is. The last three are final."""

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
    """Why the agent loop ended. All of these are graded."""

    FINISHED = "finished"
    NO_TOOL_CALL = "no_tool_call"
    MALFORMED = "malformed"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    TIME_LIMIT = "time_limit"
    LOOP = "loop"


class AgentLimits(_Wire):
    """Bounds of the agent loop.

    Args:
        max_turns: most model calls.
        max_tokens: most tokens of the whole context, prompt included.
        max_malformed: consecutive answers without a readable tool call before the loop ends.
        max_repeats: the same calls with the same outcome in so many turns on end, or two such turns so often
            in alternation, end the loop; 0 never does.
        max_observation_chars: longer observations are cut in the middle; None leaves them as the tool gives
            them.
        reserve_tokens: of `max_tokens`, what is kept for the end: before the context grows into it, what was
            observed last is cut to fit, and the model is told once to finish. 0 does neither.
        tool_timeout_s: seconds one tool call may take.
        init_s, run_s, eval_s: active seconds each stage may take; waiting in a queue does not count.
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


class GroupRequest(_Wire):
    """Ask for `samples` episodes of one task.

    Args:
        id: the caller's id of the group; submitting it again is the same submission.
        environment: name of a registered environment family.
        task: one data row of that family.
        samples: episodes wanted; job ids are `<group id>/<index>`.
        lease_s: seconds after which what is left of it is cancelled, if nobody asks about it: a request that
            names it renews that, and one that waits holds it. None goes on without anybody.
    """

    id: JobId
    environment: str = Field(min_length=1, max_length=100)
    task: dict[str, Any]
    samples: int = Field(default=1, ge=1, le=1024)
    sampling: Sampling = Sampling()
    limits: AgentLimits = AgentLimits()
    lease_s: Lease = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("task", "metadata")
    @classmethod
    def _is_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        return checked_json(value)


class Failure(_Wire):
    """Why there is no reward.

    Args:
        kind: the boundary that failed.
        stage: where the job was.
        message: what happened; `hint`: what to do about it.
        retryable: another attempt may well succeed.
    """

    kind: FailureKind
    stage: Stage
    message: str
    hint: str = ""
    retryable: bool = False


class TurnRecord(_Wire):
    """One model call within the trajectory.

    Args:
        start: index into the trajectory's `ids` of this turn's first sampled token.
        end: one past its last.
        finish_reason: stop, length or abort.
        weight_version: version of the weights that sampled it, the oldest where there were several; ""
            where none is known.
        server: base URL of the server that sampled it.
        model_s: seconds of the model call, without what it was held while weights changed; `tools_s`:
            seconds of the tool calls that followed.
        version_spans: where several versions sampled it, which one sampled what, as indices from `start` on.
        cached_tokens: prompt tokens that the server found in its cache; None where it does not say.
        exact: False where the server gave text, and the ids are only a tokenisation of it.
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
    exact: bool = True


class Trajectory(_Wire):
    """A row of the token ledger: exactly what the model read and wrote. Most episodes are one row.

    Args:
        ids: all token ids in order, shape [T].
        loss_mask: 1 where the policy sampled the token, else 0, shape [T]. A turn that is not exact has 0.
        logprobs: log-probability of each sampled token, 0.0 where the mask is 0, shape [T].
        turns: the model calls, as spans of `ids`.
        drift: tokens by which a prompt sent to a server differed from the ids already recorded. Zero by
            construction, and counted all the same.
        exact: the ids are those that the model read and sampled. False where a server gave text: then
            nothing in it may be trained on, and `mask_sample` is set.
        parent: index in `Result.rows` of the row that it branched off from, where a harness rewrote the
            history: the first `shared` ids are those of that row, which is where they are trained on. So in
            `Result.aborted`.
    """

    ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    turns: list[TurnRecord]
    drift: int = 0
    exact: bool = True
    parent: int | None = None
    shared: int = 0


class Timings(_Wire):
    """Seconds a job spent, active and waiting apart.

    Args:
        queued_s: waiting for any stage.
        init_s, run_s, eval_s: active time of each stage.
        model_s, tools_s: parts of run_s.
        held_s: turns held while weights changed; in none of the others.
    """

    queued_s: float = 0.0
    init_s: float = 0.0
    run_s: float = 0.0
    eval_s: float = 0.0
    model_s: float = 0.0
    tools_s: float = 0.0
    held_s: float = 0.0


class Result(_Wire):
    """What one job came to. `reward` is a number only where a grader gave it.

    Args:
        version: of this format.
        cursor: position in the service's stream of results; strictly increasing.
        job_id, group_id, sample, environment, task_id: what this is a result of.
        batch_id: the batch that began the group, if any; a later one may have taken it over.
        state: done, failed or cancelled.
        reward: the grader's scalar; None unless `state` is done.
        mask_sample: True where a trainer must leave this sample out of the loss.
        stop_reason: why the agent loop ended, where it did.
        failure: why there is no reward; None where there is one.
        components, evidence: the grade in detail.
        messages: the conversation, readable; `trajectory` is the truth.
        forks: rows of the same episode that came before `trajectory`, where its history was rewritten
            (`service.reasoning`). Each is trained on alone; all share the reward, so that a loss is
            normalised per episode.
        aborted: of each answer that a harness did not wait for, the context and what was sampled of it, where
            the model's server told; its turn's `finish_reason` is abort. Not among `rows`: to train on it is
            the trainer's choice.
        tools: the tools on offer, in OpenAI function format.
        attempts: how often the job was started; 0 where it was cancelled before.
    """

    version: Literal[1] = RESULT_VERSION
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
    aborted: list[Trajectory] = Field(default_factory=list)
    timings: Timings = Timings()
    attempts: int = 1
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def rows(self) -> list[Trajectory]:
        """What there is to train on: the forks, and the trajectory last."""
        return [*self.forks, *([self.trajectory] if self.trajectory else [])]


class GroupStatistics(_Wire):
    """What a trainer sees of a finished group.

    Args:
        rewards: one per sample, None where there is none.
        mean, std: over the samples that have a reward (population standard deviation).
        informative: the rewards differ, so the group carries a gradient (DAPO's filter).
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
