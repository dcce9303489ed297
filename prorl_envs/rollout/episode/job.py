"""One job in the service: its attempts, times and result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from opentelemetry.trace import INVALID_SPAN, Span

from prorl_envs.env.base import Environment, Grade, Message, Prompt, Task
from prorl_envs.errors import FailureKind
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.agent.agent_loop import AgentLoop, EpisodeSettings, Transcript
from prorl_envs.rollout.api.interactive import PromptView, StepView
from prorl_envs.rollout.api.types import (
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
from prorl_envs.rollout.scheduling.placement import HERE

_NO_TIME = dict.fromkeys(Stage, 0.0)


class Spent(NamedTuple):
    """Seconds of model calls, tool calls and holds in the agent loop, see `Timings`."""

    model_s: float = 0.0
    tools_s: float = 0.0
    held_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Progress of an episode that its caller drives.

    Args:
        room: number of tokens by which the context may still grow.
        prompt: the initial prompt; None after a step.
        last: outcome of the last step; None before the first step.
    """

    room: int
    prompt: PromptView | None = None
    last: StepView | None = None


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """Partial or final result of an attempt.

    Args:
        prompted: INIT has returned its prompt.
        messages: the conversation; `tools`: the tools offered to the model, in OpenAI's format.
        trajectory: the tokens; None before the prompt is rendered. `forks`: the rows before it.
        unfinished_answers: answers that a harness did not wait for.
        stop_reason: why the agent loop stopped; None if it did not stop by itself.
        grade: the grade, if there is one.
        spent: time spent in the agent loop.
        progress: progress of an episode that its caller drives, else None.
    """

    prompted: bool = False
    messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] = ()
    trajectory: Trajectory | None = None
    forks: Sequence[Trajectory] = ()
    unfinished_answers: Sequence[Trajectory] = ()
    stop_reason: StopReason | None = None
    grade: Grade | None = None
    spent: Spent = field(default_factory=Spent)
    progress: StepProgress | None = None

    @property
    def rows(self) -> list[Trajectory]:
        """All token rows of the attempt."""
        return [*self.forks, *([self.trajectory] if self.trajectory else [])]

    @property
    def trainable(self) -> bool:
        """True if the attempt has a grade and sampled tokens, and all rows are token-exact."""
        sampled = any(turn.end > turn.start for row in self.rows for turn in row.turns)
        return self.grade is not None and sampled and all(row.token_exact for row in self.rows)


@dataclass(slots=True)
class Attempt:
    """State of one attempt; a new attempt starts empty.

    Attributes:
        loop, steps, progress: agent loop, number of started steps and progress, if a caller drives the
            attempt. They are only set on the machine that runs the attempt.
        remote_report: last report of the node that runs the attempt; None if it runs on this machine.
    """

    environment: Environment[Any] | None = None
    prompt: Prompt | None = None
    transcript: Transcript = field(default_factory=Transcript)
    stop_reason: StopReason | None = None
    grade: Grade | None = None
    failure: Failure | None = None
    loop: AgentLoop | None = None
    steps: int = 0
    progress: StepProgress | None = None
    remote_report: AttemptReport | None = None

    def report(self) -> AttemptReport:
        """Return the attempt's current report."""
        if self.remote_report is not None:
            return self.remote_report
        ledger = self.transcript.ledger
        tools = self.transcript.tools
        if tools is None:
            tools = self.prompt.tools if self.prompt else ()
        return AttemptReport(
            prompted=self.prompt is not None,
            messages=list(self.transcript.messages),
            tools=[tool.to_openai() for tool in tools],
            trajectory=ledger.trajectory() if ledger else None,
            forks=ledger.forks if ledger else (),
            unfinished_answers=ledger.unfinished_answers if ledger else (),
            stop_reason=self.stop_reason,
            grade=self.grade,
            spent=self.spent(),
            progress=self.progress,
        )

    @property
    def current_progress(self) -> StepProgress | None:
        """Progress of an attempt that its caller drives, on any node; None before the prompt is rendered."""
        return self.remote_report.progress if self.remote_report is not None else self.progress

    def spent(self) -> Spent:
        """Return the seconds that the agent loop has used so far."""
        if self.remote_report is not None:
            return self.remote_report.spent
        ledger, held_s = self.transcript.ledger, self.transcript.held.seconds()
        return Spent(ledger.model_s, ledger.tools_s, held_s) if ledger else Spent(held_s=held_s)


@dataclass(slots=True)
class Job:
    """One sample of a group, with its attempts and times.

    Args:
        request: request of the job's group.
        sample: index of the job in the group.
        task: the validated task of the request.
        waiting_since: clock time at which the job last started to wait, in seconds.
        attempts: number of started attempts: those that the scheduler counts, and `interrupted` ones.
        interrupted: number of attempts that stops of earlier services interrupted. They did not fail.
        batch_id: the batch that started the group, if any.
        readmitted: True if an earlier service accepted the job.
        span: trace span of the job.
        node: node of the current or last attempt.
        started_at: clock time at which the last stage started, in seconds.
    """

    request: GroupRequest
    sample: int
    task: Task
    waiting_since: float
    attempts: int = 0
    interrupted: int = 0
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
        """Session id for the router. All attempts share it, so that a further attempt is sent to the server
        that has the prompt in its cache."""
        return self.id

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of this job. A seed of the group becomes another seed for each sample, so that
        samples differ but are reproducible."""
        sampling = self.request.sampling
        if sampling.seed is None:
            return sampling
        return sampling.model_copy(update={"seed": sampling.seed + self.sample})

    @property
    def settings(self) -> EpisodeSettings:
        """Settings for the agent loop, a harness or a model endpoint."""
        return {"limits": self.request.limits, "sampling": self.sampling, "session": self.session}

    def new_attempt(self) -> None:
        """Replace the failed attempt with an empty one. Add its times to those of the job."""
        self._add_times()
        self.attempt = Attempt()

    def cancelled(self) -> None:
        """Set the failure of a job that was cancelled on request."""
        report = self.attempt.report()
        stage = Stage.RUN if report.prompted else Stage.INIT
        self.attempt.failure = Failure(
            kind=FailureKind.CANCELLED,
            stage=Stage.EVAL if report.stop_reason is not None else stage,
            message="a client cancelled this job",
        )

    def result(self, state: JobState) -> Result:
        """Return the job's result. If `state` is not final, the result is partial."""
        report = self.attempt.report()
        grade = report.grade if state is JobState.DONE else None
        return Result(
            job_id=self.id,
            group_id=self.request.id,
            batch_id=self.batch_id,
            sample=self.sample,
            environment=self.request.environment,
            task_id=self.task.id,
            state=state,
            reward=grade.reward if grade else None,
            mask_sample=grade is None or not report.trainable,
            stop_reason=report.stop_reason,
            failure=None if grade else self.attempt.failure,
            components=dict(grade.components) if grade else {},
            evidence=grade.evidence if grade else {},
            messages=list(report.messages),
            tools=list(report.tools),
            trajectory=report.trajectory,
            forks=list(report.forks),
            unfinished_answers=list(report.unfinished_answers),
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

    def _add_times(self) -> None:
        spent = self.timings()
        self.model_s, self.tools_s, self.held_s = spent.model_s, spent.tools_s, spent.held_s
