"""One job on its way through the stages: what is known of it, and the result it comes to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from opentelemetry.trace import INVALID_SPAN, Span

from prorl_envs.env.base import Environment, Grade, Message, Prompt, Task
from prorl_envs.errors import FailureKind
from prorl_envs.policy.types import Sampling
from prorl_envs.rollout.agent import Transcript
from prorl_envs.rollout.placement import HERE
from prorl_envs.rollout.types import (
    Failure,
    GroupRequest,
    JobState,
    Result,
    Stage,
    StopReason,
    Timings,
    Trajectory,
    job_id,
)

_NO_TIME = dict.fromkeys(Stage, 0.0)


class Spent(NamedTuple):
    """Seconds of the agent loop, as in `Timings`."""

    model_s: float = 0.0
    tools_s: float = 0.0
    held_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Account:
    """What an attempt has come to, as a result tells it.

    Args:
        prompted: INIT has returned its prompt.
        messages: the conversation; `tools`: those on offer, in OpenAI's format.
        trajectory: the tokens; None before the prompt is rendered. `forks`: the rows before it.
        aborted: answers that a harness did not wait for.
        stop_reason: why the agent loop ended, where it did.
        grade: where there is one.
        spent: on the agent loop.
    """

    prompted: bool = False
    messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] = ()
    trajectory: Trajectory | None = None
    forks: Sequence[Trajectory] = ()
    aborted: Sequence[Trajectory] = ()
    stop_reason: StopReason | None = None
    grade: Grade | None = None
    spent: Spent = field(default_factory=Spent)

    @property
    def rows(self) -> list[Trajectory]:
        """All tokens there are."""
        return [*self.forks, *([self.trajectory] if self.trajectory else [])]

    @property
    def trainable(self) -> bool:
        """It has a grade, and tokens that the policy sampled and that are exactly those it sampled."""
        sampled = any(turn.end > turn.start for row in self.rows for turn in row.turns)
        return self.grade is not None and sampled and all(row.exact for row in self.rows)


@dataclass(slots=True)
class Attempt:
    """What one attempt has of its own; a new attempt starts from nothing.

    Attributes:
        told: what another node that carries it out has told of it; None for one that is here.
    """

    environment: Environment[Any] | None = None
    prompt: Prompt | None = None
    transcript: Transcript = field(default_factory=Transcript)
    stop_reason: StopReason | None = None
    grade: Grade | None = None
    failure: Failure | None = None
    told: Account | None = None

    def account(self) -> Account:
        """What it has come to by now."""
        if self.told is not None:
            return self.told
        ledger = self.transcript.ledger
        tools = self.transcript.tools
        if tools is None:
            tools = self.prompt.tools if self.prompt else ()
        return Account(
            prompted=self.prompt is not None,
            messages=list(self.transcript.messages),
            tools=[tool.to_openai() for tool in tools],
            trajectory=ledger.trajectory() if ledger else None,
            forks=ledger.forks if ledger else (),
            aborted=ledger.aborted if ledger else (),
            stop_reason=self.stop_reason,
            grade=self.grade,
            spent=self.spent(),
        )

    def spent(self) -> Spent:
        """Seconds of its agent loop by now."""
        if self.told is not None:
            return self.told.spent
        ledger, held_s = self.transcript.ledger, self.transcript.held.seconds()
        return Spent(ledger.model_s, ledger.tools_s, held_s) if ledger else Spent(held_s=held_s)


@dataclass(slots=True)
class Episode:
    """A job.

    Args:
        request: the group it belongs to.
        sample: its index in the group.
        task: the request's task, validated.
        waiting_since: clock time at which it last began to wait, seconds.
        attempts: how often it was started.
        span: its trace.
        failures: how many of these attempts failed; one that was interrupted by the end of a service did not.
        batch_id: the batch that began its group, if any.
        readmitted: whether an earlier service accepted it.
        node: where its attempt is, or the last one was.
        started_at: clock time at which its last stage began, seconds.
    """

    request: GroupRequest
    sample: int
    task: Task
    waiting_since: float
    attempts: int = 0
    failures: int = 0
    batch_id: str | None = None
    readmitted: bool = False
    attempt: Attempt = field(default_factory=Attempt)
    queued_s: float = 0.0
    active_s: dict[Stage, float] = field(default_factory=_NO_TIME.copy)
    model_s: float = 0.0
    tools_s: float = 0.0
    span: Span = INVALID_SPAN
    held_s: float = 0.0
    node: str = HERE
    started_at: float = 0.0

    @property
    def id(self) -> str:
        return job_id(self.request.id, self.sample)

    @property
    def session(self) -> str:
        """What the model servers know this job as. Another attempt is the same session: it begins with the
        same prompt, which the server that answered before still has in its cache."""
        return self.id

    @property
    def sampling(self) -> Sampling:
        """How to sample this job. Samples of a group with a seed differ, and each can be repeated."""
        sampling = self.request.sampling
        if sampling.seed is None:
            return sampling
        return sampling.model_copy(update={"seed": sampling.seed + self.sample})

    def new_attempt(self) -> None:
        """Forget the last attempt, which failed, and keep the time it took."""
        self._account()
        self.failures += 1
        self.attempt = Attempt()

    def cancelled(self) -> None:
        """Somebody asked for the end of this job."""
        account = self.attempt.account()
        stage = Stage.RUN if account.prompted else Stage.INIT
        self.attempt.failure = Failure(
            kind=FailureKind.CANCELLED,
            stage=Stage.EVAL if account.stop_reason is not None else stage,
            message="somebody asked for the end of this job",
        )

    def result(self, state: JobState) -> Result:
        """What the job came to; `state` is final."""
        account = self.attempt.account()
        grade = account.grade if state is JobState.DONE else None
        return Result(
            job_id=self.id,
            group_id=self.request.id,
            batch_id=self.batch_id,
            sample=self.sample,
            environment=self.request.environment,
            task_id=self.task.id,
            state=state,
            reward=grade.reward if grade else None,
            mask_sample=grade is None or not account.trainable,
            stop_reason=account.stop_reason,
            failure=None if grade else self.attempt.failure,
            components=dict(grade.components) if grade else {},
            evidence=grade.evidence if grade else {},
            messages=list(account.messages),
            tools=list(account.tools),
            trajectory=account.trajectory,
            forks=list(account.forks),
            aborted=list(account.aborted),
            timings=self.timings(),
            attempts=self.attempts,
            metadata=self.request.metadata,
        )

    def timings(self) -> Timings:
        spent = self.attempt.spent()
        return Timings(
            queued_s=self.queued_s,
            init_s=self.active_s[Stage.INIT],
            run_s=self.active_s[Stage.RUN],
            eval_s=self.active_s[Stage.EVAL],
            model_s=self.model_s + spent.model_s,
            tools_s=self.tools_s + spent.tools_s,
            held_s=self.held_s + spent.held_s,
        )

    def _account(self) -> None:
        spent = self.timings()
        self.model_s, self.tools_s, self.held_s = spent.model_s, spent.tools_s, spent.held_s
