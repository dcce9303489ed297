"""Interactive episodes, which a caller drives step by step: INIT, any number of steps, EVAL.

Episodes are not stored: an episode is closed with the service, or after a time without requests for it. Each
operation is a task of its own, so a caller that disconnects and asks again finds it still running. Episodes
and jobs share the limit of environments. Failures are not retried, because the service cannot repeat the
caller's steps.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prorl_envs.clock import Clock
from prorl_envs.env.base import Task
from prorl_envs.errors import FailureKind, InputError
from prorl_envs.rollout.agent.agent_loop import Agent
from prorl_envs.rollout.api.errors import Conflict, NotFound, OutOfOrder, QueueFull
from prorl_envs.rollout.api.interactive import (
    CallStep,
    EpisodeRequest,
    EpisodeState,
    EpisodeView,
    PromptView,
    StepRequest,
    StepView,
    TokenStep,
)
from prorl_envs.rollout.api.types import Failure, JobState, Result, Stage
from prorl_envs.rollout.endpoint.session import ModelSession
from prorl_envs.rollout.episode.engine import Engine, StageExecutor
from prorl_envs.rollout.episode.job import Job
from prorl_envs.rollout.scheduling.placement import HERE

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Driven:
    """One open episode. `work` is the current or last operation of the service on it."""

    request: EpisodeRequest
    job: Job
    idle_s: float
    touched: float
    state: EpisodeState = EpisodeState.WAITING
    room: int = 0  # tokens by which the context may still grow
    prompt: PromptView | None = None
    steps: int = 0
    by_tokens: bool | None = None  # whether steps give tokens; None before the first step
    last: StepView | None = None
    model: ModelSession | None = None  # its model endpoint, if the caller's agent opened one
    result: Result | None = None
    work: asyncio.Task[None] | None = None
    closing: asyncio.Task[None] | None = None
    watching: asyncio.Task[None] | None = field(default=None)

    @property
    def guest(self) -> str:
        """Name of the episode as an external holder of an environment."""
        return f"episode {self.request.id}"


class InteractiveEpisodes:
    """The episodes that callers drive.

    Args:
        executor: carries out stages and steps.
        agent: answers the model endpoints of episodes.
        engine: limits the number of environments.
        clock: measures idleness.
        most: maximum number of open episodes.
        idle_s: seconds without a request after which an episode is closed.
    """

    def __init__(
        self, executor: StageExecutor, agent: Agent, engine: Engine, clock: Clock, *, most: int, idle_s: float
    ) -> None:
        self.failures = 0
        self.internal_errors = 0
        self._executor = executor
        self._agent = agent
        self._engine = engine
        self._clock = clock
        self._most = most
        self._idle_s = idle_s
        self._open: dict[str, _Driven] = {}
        self._models: dict[str, ModelSession] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def count(self, prefix: str) -> int:
        """Return the number of open episodes whose id starts with `prefix`."""
        return sum(name.startswith(prefix) for name in self._open)

    # Requests of callers. Each waits up to `wait_s` seconds for the operation, then returns the state.

    async def start(self, request: EpisodeRequest, task: Task, *, wait_s: float) -> EpisodeView:
        """Start an episode: wait for room, start its sandbox, prepare its task.

        Raises:
            Conflict: the id is taken by another request.
            QueueFull: the maximum number of episodes is open.
        """
        known = self._open.get(request.id)
        if known is None:
            if len(self._open) >= self._most:
                hint = "end one, or submit groups, which wait"
                raise QueueFull(f"{self._most} episodes are open, and no more may be", hint=hint)
            known = self._new(request, task)
        elif known.request != request:
            raise Conflict(f"episode {request.id!r} is known with another request", hint="use a new id")
        return await self._answer(known, wait_s, prompt=True)

    async def view(self, name: str, *, wait_s: float) -> EpisodeView:
        """Return the state of an episode.

        Raises:
            NotFound: no such episode.
        """
        return await self._answer(self._get(name), wait_s, prompt=True)

    async def step(self, name: str, step: StepRequest, *, wait_s: float) -> EpisodeView:
        """Take a step.

        Raises:
            NotFound: no such episode.
            OutOfOrder: it is not ready, or this is not the next step, or tokens and tool calls are mixed.
            InputError: more tokens than there is room for.
        """
        driven = self._get(name)
        if step.step is not None and step.step == driven.steps - 1:  # a repeated request
            return await self._answer(driven, wait_s)
        self._check_step(driven, step)
        driven.by_tokens = not isinstance(step, CallStep)
        driven.steps += 1
        driven.state = EpisodeState.RUN
        self._begin(driven, self._run(driven, step))
        return await self._answer(driven, wait_s)

    async def endpoint(self, name: str) -> ModelSession:
        """Open the model endpoint of an episode whose agent runs outside the service. Idempotent. Its answers
        are recorded as the episode's tokens.

        Raises:
            NotFound: no such episode.
            OutOfOrder: the episode is not ready, is driven by tokens, or runs on another machine.
        """
        driven = self._get(name)
        if driven.model is None:
            _check_state(driven, EpisodeState.READY)
            if driven.job.node != HERE:
                raise OutOfOrder("the episode runs on another machine", hint="start it with endpoint: true")
            if driven.by_tokens:
                raise OutOfOrder("the episode is driven by tokens", hint="open the endpoint before any step")
            driven.by_tokens = False
            job = driven.job
            driven.model = ModelSession(self._agent, job.attempt.transcript, **job.settings)
            self._models[driven.model.key] = driven.model
        driven.touched = self._clock.monotonic()
        return driven.model

    def model(self, key: str) -> ModelSession | None:
        """Return the endpoint that has this key; None for an unknown key."""
        return self._models.get(key)

    async def evaluate(self, name: str, *, wait_s: float) -> EpisodeView:
        """Grade an episode and then close its sandbox. Idempotent.

        Raises:
            NotFound: no such episode.
            OutOfOrder: it has not started, is busy, or has failed.
        """
        driven = self._get(name)
        if driven.state not in (EpisodeState.EVAL, EpisodeState.GRADED):
            _check_state(driven, EpisodeState.READY, EpisodeState.STOPPED)
            driven.state = EpisodeState.EVAL
            await self._close_model(driven)
            self._begin(driven, self._evaluate(driven))
        return await self._answer(driven, wait_s)

    async def close(self, name: str) -> None:
        """Stop an episode in any state; returns once its sandbox is closed.

        Raises:
            NotFound: no such episode.
        """
        await asyncio.wait([self._end(self._get(name))])

    async def aclose(self) -> None:
        """Close all episodes. Idempotent."""
        for driven in list(self._open.values()):
            self._end(driven)
        if self._ending:
            await asyncio.wait(set(self._ending))

    # Operations.

    def _new(self, request: EpisodeRequest, task: Task) -> _Driven:
        now = self._clock.monotonic()
        idle_s = min(request.idle_s or self._idle_s, self._idle_s)
        driven = _Driven(request, Job(request.as_group(), 0, task, now), idle_s, now)
        self._open[request.id] = driven
        self._begin(driven, self._init(driven))
        driven.watching = asyncio.create_task(self._watch(driven))
        return driven

    async def _init(self, driven: _Driven) -> None:
        job = driven.job
        job.node = await self._engine.reserve(driven.guest, here=driven.request.endpoint)
        driven.state = EpisodeState.INIT
        job.queued_s = self._clock.monotonic() - job.waiting_since
        job.attempts = 1
        try:
            failure = await self._executor.perform(job, Stage.INIT)
        finally:
            self._engine.prepared(driven.guest)
        failure = failure or await self._executor.step(job, None)
        if failure is not None:
            await self._fail(driven, failure)
            return
        progress = job.attempt.current_progress
        assert progress is not None
        driven.prompt, driven.room = progress.prompt, progress.room
        driven.state = EpisodeState.READY

    async def _run(self, driven: _Driven, step: StepRequest) -> None:
        failure = await self._executor.step(driven.job, step)
        if failure is not None:
            await self._fail(driven, failure)
            return
        progress = driven.job.attempt.current_progress
        assert progress is not None and progress.last is not None
        driven.last, driven.room = progress.last, progress.room
        driven.state = EpisodeState.READY if progress.last.stop_reason is None else EpisodeState.STOPPED

    async def _evaluate(self, driven: _Driven) -> None:
        failure = await self._executor.perform(driven.job, Stage.EVAL)
        if failure is not None:
            await self._fail(driven, failure)
            return
        driven.result = driven.job.result(JobState.DONE)
        driven.state = EpisodeState.GRADED
        self._release(driven)

    async def _fail(self, driven: _Driven, failure: Failure) -> None:
        await self._executor.collect(driven.job)
        self._failed(driven, failure)

    def _failed(self, driven: _Driven, failure: Failure) -> None:
        self.failures += 1
        self.internal_errors += failure.kind is FailureKind.INTERNAL
        driven.job.attempt.failure = failure
        driven.result = driven.job.result(JobState.FAILED)
        driven.state = EpisodeState.FAILED
        self._release(driven)

    # Closing.

    def _release(self, driven: _Driven) -> asyncio.Task[None]:
        """Close the environment, then release its place."""
        if driven.closing is None:
            driven.closing = asyncio.create_task(self._close(driven))
        return driven.closing

    async def _close_model(self, driven: _Driven) -> None:
        """Close the model endpoint of the episode."""
        if driven.model is not None:
            self._models.pop(driven.model.key, None)
            await driven.model.aclose()

    async def _close(self, driven: _Driven) -> None:
        await self._close_model(driven)
        self._agent.forget(driven.job.session)
        if not await self._executor.close(driven.job):
            self._engine.close_failures += 1
        self._engine.release(driven.guest)

    def _end(self, driven: _Driven) -> asyncio.Task[None]:
        del self._open[driven.request.id]
        task = asyncio.create_task(self._finish(driven))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _finish(self, driven: _Driven) -> None:
        running = [task for task in (driven.work, driven.watching) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await self._release(driven)

    async def _watch(self, driven: _Driven) -> None:
        """Close the episode when it has been idle for too long."""
        while True:
            if driven.state.busy and driven.work is not None:
                await asyncio.wait([driven.work])
                driven.touched = self._clock.monotonic()
            if driven.model is not None:
                now = self._clock.monotonic()
                driven.touched = max(driven.touched, now if driven.model.calls else driven.model.touched)
            left = driven.touched + driven.idle_s - self._clock.monotonic()
            if left <= 0:
                break
            await self._clock.sleep(left)
        log.warning("episode %s: no request for %g s; it is closed", driven.request.id, driven.idle_s)
        driven.watching = None  # this task itself, which must not be cancelled
        self._end(driven)

    # Helpers.

    def _begin(self, driven: _Driven, work: Coroutine[Any, Any, None]) -> None:
        driven.work = asyncio.create_task(work)
        driven.work.add_done_callback(partial(self._ended, driven))

    def _ended(self, driven: _Driven, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.internal_errors += 1
            log.critical("episode %s met a bug", driven.request.id, exc_info=error)
            self._failed(driven, _BUG)

    async def _answer(self, driven: _Driven, wait_s: float, *, prompt: bool = False) -> EpisodeView:
        driven.touched = self._clock.monotonic()
        if driven.state.busy and driven.work is not None and wait_s > 0:
            try:
                async with self._clock.timeout(wait_s):
                    await asyncio.wait([driven.work])
            except TimeoutError:
                pass  # the returned state shows it
            self._get(driven.request.id)  # it may have been closed meanwhile
            driven.touched = self._clock.monotonic()
        return EpisodeView(
            id=driven.request.id,
            environment=driven.request.environment,
            task_id=driven.job.task.id,
            state=driven.state,
            steps=driven.steps,
            prompt=driven.prompt if prompt else None,
            last=driven.last,
            failure=driven.job.attempt.failure,
            result=driven.result,
        )

    def _get(self, name: str) -> _Driven:
        if name not in self._open:
            raise NotFound(f"no episode {name!r}", hint="it was ended, or received no request for too long")
        return self._open[name]

    def _check_step(self, driven: _Driven, step: StepRequest) -> None:
        _check_state(driven, EpisodeState.READY)
        if step.step is not None and step.step != driven.steps:
            raise OutOfOrder(f"the next step is {driven.steps}, and not {step.step}")
        if driven.by_tokens is not None and driven.by_tokens == isinstance(step, CallStep):
            raise OutOfOrder(
                "an episode is driven by tokens or by tool calls",
                hint="after tool calls the service does not know the context",
            )
        if isinstance(step, TokenStep) and len(step.ids) > driven.room:
            raise InputError(f"{len(step.ids)} tokens are more than the {driven.room} there is room for")


_BUG = Failure(
    kind=FailureKind.INTERNAL,
    stage=Stage.RUN,
    message="the service met a bug",
    hint="its log has the traceback",
)


def _check_state(driven: _Driven, *wanted: EpisodeState) -> None:
    if driven.state not in wanted:
        allowed = " or ".join(wanted)
        raise OutOfOrder(f"the episode is {driven.state}, and has to be {allowed} for this")
