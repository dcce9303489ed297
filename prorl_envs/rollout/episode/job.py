"""One job in the service: its attempts, times and result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span

from prorl_envs.env.base import Environment, Grade, Prompt, Task
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.rollout.agent.agent_loop import AgentLoop, EpisodeSettings, Transcript, TurnJournal
from prorl_envs.rollout.api.interactive import PromptView, StepView
from prorl_envs.rollout.api.types import (
    BranchOrigin,
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


@dataclass(slots=True)
class Attempt:
    """State of one attempt; a new attempt starts empty.

    Attributes:
        active_s: active seconds of each stage.
        loop: agent loop, if it can be interrupted: a caller drives the attempt, or it branches.
        steps: number of started steps, if a caller drives the attempt.
        branch: where the episode branched off, or None.
        progress: progress of an attempt that its caller drives; None before the prompt is rendered.
        reported: last result that the node of the attempt has sent; None if it runs on this machine, where
            the attributes before `progress` have its state.
    """

    environment: Environment[Any] | None = None
    prompt: Prompt | None = None
    transcript: Transcript = field(default_factory=Transcript)
    stop_reason: StopReason | None = None
    grade: Grade | None = None
    failure: Failure | None = None
    active_s: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    loop: AgentLoop | None = None
    steps: int = 0
    branch: BranchOrigin | None = None
    progress: StepProgress | None = None
    reported: Result | None = None

    def timings(self) -> Timings:
        """Return the times of the attempt so far. They do not include `queued_s`."""
        if self.reported is not None:
            return self.reported.timings
        ledger = self.transcript.ledger
        return Timings(
            **{f"{stage}_s": seconds for stage, seconds in self.active_s.items()},
            model_s=ledger.model_s if ledger else 0.0,
            tools_s=ledger.tools_s if ledger else 0.0,
            held_s=self.transcript.held.seconds(),
        )


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
        queued_s: seconds that the job waited for its stages.
        earlier: times of the attempts that failed.
        recorded: answers of the jobs with whose turns this one starts, by `Ledger.history`.
        journal: sampled answers of all attempts; None if they are not stored.
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
    earlier: Timings = field(default_factory=Timings)
    recorded: Mapping[bytes, Sampled] = field(default_factory=dict)
    journal: TurnJournal | None = None
    span: Span = INVALID_SPAN
    node: str = HERE
    started_at: float = 0.0

    @property
    def id(self) -> str:
        return job_id(self.request.id, self.sample)

    @property
    def is_trunk(self) -> bool:
        """True if the other jobs of the group start from this one's checkpoint."""
        return self.sample == 0 and self.request.branch_at > 0

    @property
    def has_stopped(self) -> bool:
        """True if the agent loop of the attempt has stopped."""
        return (self.attempt.reported or self.attempt).stop_reason is not None

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
        """Settings for the agent loop, a harness or a model endpoint. All attempts share a session, so that a
        further attempt is sent to the model server that has the prompt in its cache."""
        return {"limits": self.request.limits, "sampling": self.sampling, "session": self.id}

    def new_attempt(self) -> None:
        """Replace the failed attempt with an empty one. Its times still count."""
        self.earlier = self.timings()
        self.attempt = Attempt()

    def result(self, state: JobState, *, whole: bool = True) -> Result:
        """Return the job's result. If `state` is not final, the result is partial.

        Args:
            whole: include the messages and tokens.
        """
        attempt, graded = self.attempt, state is JobState.DONE
        fields: dict[str, Any] = {
            "batch_id": self.batch_id,
            "state": state,
            "failure": None if graded else attempt.failure,
            "timings": self.timings(),
            "attempts": self.attempts,
        }
        if attempt.reported is not None:
            ungraded: dict[str, Any] = {"reward": None, "mask_sample": True, "components": {}, "evidence": {}}
            return attempt.reported.model_copy(update=fields if graded else fields | ungraded)
        if whole:
            fields |= self._messages_and_tokens()
        rows = [*fields.get("forks", ()), *filter(None, [fields.get("trajectory")])]
        grade = attempt.grade if graded else None
        return Result(
            job_id=self.id,
            group_id=self.request.id,
            sample=self.sample,
            environment=self.request.environment,
            task_id=self.task.id,
            reward=grade.reward if grade else None,
            mask_sample=grade is None or not _trainable(rows),
            stop_reason=attempt.stop_reason,
            components=dict(grade.components) if grade else {},
            evidence=grade.evidence if grade else {},
            metadata=self.request.metadata,
            branch=attempt.branch,
            **fields,
        )

    def _messages_and_tokens(self) -> dict[str, Any]:
        transcript, prompt = self.attempt.transcript, self.attempt.prompt
        ledger, tools = transcript.ledger, transcript.tools
        if tools is None:
            tools = prompt.tools if prompt else ()
        return {
            "messages": list(transcript.messages),
            "tools": [tool.to_openai() for tool in tools],
            "trajectory": ledger.trajectory() if ledger else None,
            "forks": list(ledger.forks) if ledger else [],
            "unfinished_answers": list(ledger.unfinished_answers) if ledger else [],
        }

    def timings(self) -> Timings:
        """Return the times of all attempts so far."""
        earlier, current = self.earlier.model_dump(), self.attempt.timings().model_dump()
        total = {name: earlier[name] + current[name] for name in earlier}
        return Timings(**{**total, "queued_s": self.queued_s})


def _trainable(rows: Sequence[Trajectory]) -> bool:
    """Return True if there are sampled tokens, and all rows are token-exact."""
    sampled = any(turn.end > turn.start for row in rows for turn in row.turns)
    return sampled and all(row.token_exact for row in rows)
