"""One job on its way through the stages: what is known of it, and the result it comes to."""

from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span

from prorl_envs.env.base import Environment, Grade, Prompt, Task
from prorl_envs.errors import FailureKind
from prorl_envs.policy.types import Sampling
from prorl_envs.rollout.agent import Transcript
from prorl_envs.rollout.types import (
    Failure,
    GroupRequest,
    JobState,
    Result,
    Stage,
    StopReason,
    Timings,
    job_id,
)


@dataclass(slots=True)
class Attempt:
    """What one attempt has of its own; a new attempt starts from nothing."""

    environment: Environment[Any] | None = None
    prompt: Prompt | None = None
    transcript: Transcript = field(default_factory=Transcript)
    stop_reason: StopReason | None = None
    grade: Grade | None = None
    failure: Failure | None = None


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
    """

    request: GroupRequest
    sample: int
    task: Task
    waiting_since: float
    attempts: int = 0
    failures: int = 0
    batch_id: str | None = None
    attempt: Attempt = field(default_factory=Attempt)
    queued_s: float = 0.0
    active_s: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    model_s: float = 0.0
    tools_s: float = 0.0
    span: Span = INVALID_SPAN
    held_s: float = 0.0

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
        attempt = self.attempt
        stage = Stage.INIT if attempt.prompt is None else Stage.RUN
        self.attempt.failure = Failure(
            kind=FailureKind.CANCELLED,
            stage=Stage.EVAL if attempt.stop_reason is not None else stage,
            message="somebody asked for the end of this job",
        )

    def result(self, state: JobState) -> Result:
        """What the job came to; `state` is final."""
        attempt, ledger = self.attempt, self.attempt.transcript.ledger
        grade = attempt.grade if state is JobState.DONE else None
        trainable = grade is not None and ledger is not None and ledger.sampled_tokens > 0 and ledger.exact
        return Result(
            job_id=self.id,
            group_id=self.request.id,
            batch_id=self.batch_id,
            sample=self.sample,
            environment=self.request.environment,
            task_id=self.task.id,
            state=state,
            reward=grade.reward if grade else None,
            mask_sample=not trainable,
            stop_reason=attempt.stop_reason,
            failure=None if grade else attempt.failure,
            components=dict(grade.components) if grade else {},
            evidence=grade.evidence if grade else {},
            messages=list(attempt.transcript.messages),
            tools=[tool.to_openai() for tool in attempt.prompt.tools] if attempt.prompt else [],
            trajectory=ledger.trajectory() if ledger else None,
            forks=ledger.forks if ledger else [],
            timings=self.timings(),
            attempts=self.attempts,
            metadata=self.request.metadata,
        )

    def timings(self) -> Timings:
        ledger = self.attempt.transcript.ledger
        return Timings(
            queued_s=self.queued_s,
            init_s=self.active_s[Stage.INIT],
            run_s=self.active_s[Stage.RUN],
            eval_s=self.active_s[Stage.EVAL],
            model_s=self.model_s + (ledger.model_s if ledger else 0.0),
            tools_s=self.tools_s + (ledger.tools_s if ledger else 0.0),
            held_s=self.held_s + self.attempt.transcript.held.seconds(),
        )

    def _account(self) -> None:
        spent = self.timings()
        self.model_s, self.tools_s, self.held_s = spent.model_s, spent.tools_s, spent.held_s
