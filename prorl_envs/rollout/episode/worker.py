"""Stage worker: runs stages under their deadlines and converts exceptions to typed `Failure`s.

This is the one place where an exception becomes data. An exception that names a boundary is an ordinary
outcome; anything else is a bug, reported with its traceback and as kind `internal`. Cancellation passes.
"""

import logging
from collections.abc import Coroutine, Mapping

from prorl_envs.clock import Clock
from prorl_envs.env.node import Node
from prorl_envs.errors import FailureKind, ProrlError, RolloutFailure, printable
from prorl_envs.model.routing.pause_gate import ActiveTimeout
from prorl_envs.rollout.agent.agent_loop import Agent, unicode
from prorl_envs.rollout.api.interactive import StepRequest
from prorl_envs.rollout.api.types import Failure, Stage
from prorl_envs.rollout.episode import caller_steps, stages
from prorl_envs.rollout.episode.job import Job

log = logging.getLogger(__name__)

#: Longest message of a failure, in characters: drivers and graders quote other programs' output.
MAX_MESSAGE = 4000


class Worker:
    """Runs stages of jobs on one node.

    Args:
        node: this machine's sandboxes.
        families: environment classes by name.
        agent: plays the RUN stage.
        clock: measures the deadlines.
        grace_s: seconds past its time limit after which a RUN stage is cancelled. The agent loop stops by
            itself at the limit; the grace is for a tool call that does not return.
        close_s: timeout of a close, seconds.
    """

    def __init__(
        self,
        node: Node,
        families: Mapping[str, stages.Family],
        agent: Agent,
        clock: Clock,
        *,
        grace_s: float,
        close_s: float,
    ) -> None:
        self._node = node
        self._families = families
        self._agent = agent
        self._clock = clock
        self._grace_s = grace_s
        self._close_s = close_s

    async def perform(self, episode: Job, stage: Stage) -> Failure | None:
        """Carry out one stage and return its failure, or None. Its time is added to the job's."""
        limits = episode.request.limits
        match stage:
            case Stage.INIT:
                work = stages.init(episode, self._node, self._families)
                return await self._timed(episode, stage, work, limits.init_s)
            case Stage.RUN:
                work = stages.run(episode, self._agent)
                return await self._timed(episode, stage, work, limits.run_s + self._grace_s)
            case Stage.EVAL:
                return await self._timed(episode, stage, stages.evaluate(episode), limits.eval_s)

    async def step(self, episode: Job, request: StepRequest | None) -> Failure | None:
        """See `StageExecutor.step`."""
        if request is None:
            work = caller_steps.render(episode, self._agent)
        else:
            work = caller_steps.take(episode, self._agent, request)
        return await self._timed(episode, Stage.RUN, work, episode.request.limits.run_s + self._grace_s)

    async def _timed(
        self, episode: Job, stage: Stage, work: Coroutine[None, None, None], seconds: float
    ) -> Failure | None:
        held = episode.attempt.transcript.held  # pauses of turns during weight updates: not active time
        started = self._clock.monotonic()
        try:
            return await self._guard(episode, stage, work, seconds)
        finally:
            elapsed = self._clock.monotonic() - started
            episode.active_s[stage] += elapsed - (held.seconds() if stage is Stage.RUN else 0.0)

    async def collect(self, episode: Job) -> None:
        """Do nothing: the attempt's state is in this process."""

    async def close(self, episode: Job) -> bool:
        """Close the job's environment. Return False if it did not close in order; closing the node removes
        the rest."""
        failure = await self._guard(episode, Stage.EVAL, stages.close(episode), self._close_s)
        if failure is not None:
            log.error("job %s: its environment did not close: %s", episode.id, printable(failure.message))
        return failure is None

    async def _guard(
        self, episode: Job, stage: Stage, work: Coroutine[None, None, None], seconds: float
    ) -> Failure | None:
        deadline = None
        try:
            held = episode.attempt.transcript.held
            async with ActiveTimeout(self._clock, seconds, held.seconds) as deadline:
                await work
        except Exception as error:  # noqa: BLE001 - the one place where failures become data
            if deadline is not None and deadline.expired():
                return Failure(
                    kind=FailureKind.TIMEOUT,
                    stage=stage,
                    message=f"{stage} used up its {seconds:g} s of active time",
                    hint=f"raise limits.{stage}_s, or look at what it waited for",
                )
            return _failure(episode, stage, error)
        return None


def _failure(episode: Job, stage: Stage, error: Exception) -> Failure:
    if isinstance(error, RolloutFailure):
        kind, retryable = error.kind, error.retryable
    elif isinstance(error, ProrlError):
        kind, retryable = FailureKind.ENVIRONMENT, False
    else:
        log.error("job %s: unexpected failure in %s", episode.id, stage, exc_info=error)
        message = f"unexpected {type(error).__name__}"
        hint = "this is a bug; the service's log has the traceback"
        return Failure(kind=FailureKind.INTERNAL, stage=stage, message=message, hint=hint)
    return Failure(
        kind=kind,
        stage=stage,
        message=unicode(error.message[:MAX_MESSAGE]),
        hint=unicode(error.hint[:MAX_MESSAGE]),
        retryable=retryable,
    )
