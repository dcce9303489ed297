"""Stage worker: runs stages under their deadlines and converts exceptions to typed `Failure`s.

This is the only place where an exception becomes data. An exception that names a boundary is an ordinary
outcome. Any other exception is a bug: it is logged with its traceback, and the failure's kind is `internal`.
A cancellation is not converted.
"""

import logging
from collections.abc import Coroutine, Mapping
from dataclasses import KW_ONLY, dataclass, field

from prorl_envs.clock import Clock
from prorl_envs.env.node import Node
from prorl_envs.errors import FailureKind, ProrlError, RolloutFailure, printable
from prorl_envs.model.routing.pause_gate import ActiveTimeout
from prorl_envs.rollout.agent.agent_loop import Agent
from prorl_envs.rollout.api.interactive import StepRequest
from prorl_envs.rollout.api.types import Failure, Stage
from prorl_envs.rollout.episode import stages
from prorl_envs.rollout.episode.job import Job
from prorl_envs.strict_json import encodable

log = logging.getLogger(__name__)

#: Maximum length of a failure's message in characters, since messages may quote output of other programs.
MAX_MESSAGE = 4000


@dataclass(eq=False)
class Worker:
    """Runs stages of jobs on one node.

    Args:
        node: starts this machine's sandboxes.
        families: environment classes by name.
        agent: runs the RUN stage.
        clock: measures the deadlines.
        grace_s: seconds after the time limit of a RUN stage at which the stage is cancelled. The agent loop
            itself stops at the limit, unless a tool call does not return.
        close_s: timeout of a close in seconds.
    """

    node: Node
    families: Mapping[str, stages.Family]
    agent: Agent
    clock: Clock
    _: KW_ONLY
    grace_s: float
    close_s: float
    _points: stages.BranchPoints = field(default_factory=dict, init=False)

    async def perform(self, job: Job, stage: Stage) -> Failure | None:
        """Run one stage and return its failure, or None. Add its active time to the job's."""
        limits = job.request.limits
        match stage:
            case Stage.INIT:
                work = stages.init(job, self.node, self.families, self._points)
                return await self._timed(job, stage, work, limits.init_s)
            case Stage.RUN:
                work = stages.run(job, self.agent, self._points)
                return await self._timed(job, stage, work, limits.run_s + self.grace_s)
            case Stage.EVAL:
                return await self._timed(job, stage, stages.evaluate(job), limits.eval_s)

    async def step(self, job: Job, request: StepRequest | None) -> Failure | None:
        work = stages.render(job, self.agent) if request is None else stages.step(job, self.agent, request)
        return await self._timed(job, Stage.RUN, work, job.request.limits.run_s + self.grace_s)

    async def _timed(
        self, job: Job, stage: Stage, work: Coroutine[None, None, None], seconds: float
    ) -> Failure | None:
        held = job.attempt.transcript.held  # time in which turns were held is not active time
        started, held_before = self.clock.monotonic(), held.seconds()
        try:
            return await self._guard(job, stage, work, seconds)
        finally:
            elapsed = self.clock.monotonic() - started
            job.attempt.active_s[stage] += elapsed - (held.seconds() - held_before)

    async def collect(self, job: Job) -> None:
        """Do nothing, since the attempt's state is in this process."""

    async def close(self, job: Job) -> bool:
        """Close the job's environment. Return False if that failed; closing the node removes it then."""
        failure = await self._guard(job, Stage.EVAL, stages.close(job), self.close_s)
        if failure is not None:
            log.error("job %s: its environment failed to close: %s", job.id, printable(failure.message))
        return failure is None

    async def forget(self, group: str) -> None:
        """See `StageExecutor.forget`."""
        if point := self._points.pop(group, None):
            self.agent.forget(point.loop.session)
            try:
                await point.checkpoint.close()
            except ProrlError as error:
                log.error("group %s: its checkpoint failed to close: %s", group, printable(error.message))

    async def _guard(
        self, job: Job, stage: Stage, work: Coroutine[None, None, None], seconds: float
    ) -> Failure | None:
        deadline = None
        try:
            held = job.attempt.transcript.held
            async with ActiveTimeout(self.clock, seconds, held.seconds) as deadline:
                await work
        except Exception as error:  # noqa: BLE001 - the one place where failures become data
            if deadline is not None and deadline.expired():
                return Failure(
                    kind=FailureKind.TIMEOUT,
                    stage=stage,
                    message=f"{stage} used up its {seconds:g} s of active time",
                    hint=f"raise limits.{stage}_s, or find out why the stage took so long",
                )
            return _failure(job, stage, error)
        return None


def _failure(job: Job, stage: Stage, error: Exception) -> Failure:
    if isinstance(error, RolloutFailure):
        kind, retryable = error.kind, error.retryable
    elif isinstance(error, ProrlError):
        kind, retryable = FailureKind.ENVIRONMENT, False
    else:
        log.error("job %s: unexpected failure in %s", job.id, stage, exc_info=error)
        message = f"unexpected {type(error).__name__}"
        hint = "this is a bug; the service's log has the traceback"
        return Failure(kind=FailureKind.INTERNAL, stage=stage, message=message, hint=hint)
    return Failure(
        kind=kind,
        stage=stage,
        message=encodable(error.message[:MAX_MESSAGE]),
        hint=encodable(error.hint[:MAX_MESSAGE]),
        retryable=retryable,
    )
