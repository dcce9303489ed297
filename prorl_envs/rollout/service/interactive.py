"""Interactive episodes, which a caller drives step by step: INIT, any number of steps, EVAL.

Episodes are not stored: an episode is closed with the service, or after a time without requests for it. Each
operation runs in its own asyncio task. So a caller that disconnects and sends the request again finds the
operation still running. Episodes count towards the same limit of sandboxes as jobs. Failures are not retried,
because the service cannot repeat the caller's steps.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import KW_ONLY, dataclass, field
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
    TokenStep,
)
from prorl_envs.rollout.api.types import Failure, JobState, Result, Stage
from prorl_envs.rollout.endpoint.session import ModelSession
from prorl_envs.rollout.episode.engine import Engine, StageExecutor
from prorl_envs.rollout.episode.job import Job, StepProgress
from prorl_envs.rollout.scheduling.placement import HERE

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _OpenEpisode:
    """One open episode. `work` is the current or last operation of the service on it."""

    request: EpisodeRequest
    job: Job
    idle_s: float
    last_used: float
    state: EpisodeState = EpisodeState.WAITING
    prompt: PromptView | None = None
    steps: int = 0
    by_tokens: bool | None = None  # True if steps contain tokens; None before the first step
    model: ModelSession | None = None  # the episode's model endpoint, if the caller's agent opened one
    result: Result | None = None
    work: asyncio.Task[None] | None = None
    closing: asyncio.Task[None] | None = None
    idle_watch: asyncio.Task[None] | None = None

    @property
    def progress(self) -> StepProgress:
        """Progress of the episode; empty before the prompt is rendered."""
        return self.job.attempt.progress or StepProgress(0)

    @property
    def guest(self) -> str:
        """Name of the episode as a guest of the scheduler."""
        return f"episode {self.request.id}"


@dataclass(eq=False)
class InteractiveEpisodes:
    """Open episodes that callers drive.

    Args:
        executor: carries out stages and steps.
        agent: serves the model endpoints of episodes.
        engine: limits the number of environments.
        clock: measures idle time.
        max_open: maximum number of open episodes.
        idle_s: seconds without a request after which an episode is closed.
    """

    executor: StageExecutor
    agent: Agent
    engine: Engine
    clock: Clock
    _: KW_ONLY
    max_open: int
    idle_s: float
    failures: int = field(default=0, init=False)
    internal_errors: int = field(default=0, init=False)
    _open: dict[str, _OpenEpisode] = field(default_factory=dict, init=False)
    _models: dict[str, ModelSession] = field(default_factory=dict, init=False)
    _ends: set[asyncio.Task[None]] = field(default_factory=set, init=False)

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
            if len(self._open) >= self.max_open:
                hint = "close an episode, or submit groups, which wait in the queue"
                raise QueueFull(f"{self.max_open} episodes are open, which is the maximum", hint=hint)
            known = self._new(request, task)
        elif known.request != request:
            raise Conflict(f"episode {request.id!r} is known with another request", hint="use a new id")
        return await self._wait_and_view(known, wait_s, prompt=True)

    async def view(self, name: str, *, wait_s: float) -> EpisodeView:
        """Return the state of an episode.

        Raises:
            NotFound: no such episode.
        """
        return await self._wait_and_view(self._get(name), wait_s, prompt=True)

    async def step(self, name: str, step: StepRequest, *, wait_s: float) -> EpisodeView:
        """Take a step.

        Raises:
            NotFound: no such episode.
            OutOfOrder: the episode is not ready, expects another step, or mixes tokens and tool calls.
            InputError: the step has more tokens than fit into the context.
        """
        episode = self._get(name)
        if step.step is not None and step.step == episode.steps - 1:  # a repeated request
            return await self._wait_and_view(episode, wait_s)
        self._check_step(episode, step)
        episode.by_tokens = not isinstance(step, CallStep)
        episode.steps += 1
        episode.state = EpisodeState.RUN
        self._start_work(episode, self._run(episode, step))
        return await self._wait_and_view(episode, wait_s)

    async def endpoint(self, name: str) -> ModelSession:
        """Open the model endpoint of an episode whose agent runs outside the service. Idempotent. Answers of
        the endpoint are recorded as the episode's tokens.

        Raises:
            NotFound: no such episode.
            OutOfOrder: the episode is not ready, is driven by tokens, or runs on another machine.
        """
        episode = self._get(name)
        if episode.model is None:
            _check_state(episode, EpisodeState.READY)
            if episode.job.node != HERE:
                raise OutOfOrder("the episode runs on another machine", hint="start it with endpoint: true")
            if episode.by_tokens:
                raise OutOfOrder("the episode is driven by tokens", hint="open the endpoint before any step")
            episode.by_tokens = False
            job = episode.job
            episode.model = ModelSession(self.agent, job.attempt.transcript, **job.settings)
            self._models[episode.model.key] = episode.model
        episode.last_used = self.clock.monotonic()
        return episode.model

    def model(self, key: str) -> ModelSession | None:
        """Return the endpoint that has this key; None for an unknown key."""
        return self._models.get(key)

    async def evaluate(self, name: str, *, wait_s: float) -> EpisodeView:
        """Grade an episode and then close its sandbox. Idempotent.

        Raises:
            NotFound: no such episode.
            OutOfOrder: the episode has not started, is busy, or has failed.
        """
        episode = self._get(name)
        if episode.state not in (EpisodeState.EVAL, EpisodeState.GRADED):
            _check_state(episode, EpisodeState.READY, EpisodeState.STOPPED)
            episode.state = EpisodeState.EVAL
            await self._close_model(episode)
            self._start_work(episode, self._evaluate(episode))
        return await self._wait_and_view(episode, wait_s)

    async def close(self, name: str) -> None:
        """Stop an episode in any state; returns once its sandbox is closed.

        Raises:
            NotFound: no such episode.
        """
        await asyncio.wait([self._end(self._get(name))])

    async def aclose(self) -> None:
        """Close all episodes. Idempotent."""
        for episode in list(self._open.values()):
            self._end(episode)
        if self._ends:
            await asyncio.wait(set(self._ends))

    # Operations.

    def _new(self, request: EpisodeRequest, task: Task) -> _OpenEpisode:
        now = self.clock.monotonic()
        idle_s = min(request.idle_s or self.idle_s, self.idle_s)
        episode = _OpenEpisode(request, Job(request.as_group(), 0, task, now), idle_s, now)
        self._open[request.id] = episode
        self._start_work(episode, self._init(episode))
        episode.idle_watch = asyncio.create_task(self._close_when_idle(episode))
        return episode

    async def _init(self, episode: _OpenEpisode) -> None:
        job = episode.job
        job.node = await self.engine.reserve(episode.guest, here=episode.request.endpoint)
        episode.state = EpisodeState.INIT
        job.queued_s = self.clock.monotonic() - job.waiting_since
        job.attempts = 1
        try:
            failure = await self.executor.perform(job, Stage.INIT)
        finally:
            self.engine.apply(self.engine.scheduler.prepared(episode.guest))
        failure = failure or await self.executor.step(job, None)
        if failure is not None:
            await self._fail(episode, failure)
            return
        episode.prompt = episode.progress.prompt
        episode.state = EpisodeState.READY

    async def _run(self, episode: _OpenEpisode, step: StepRequest) -> None:
        failure = await self.executor.step(episode.job, step)
        if failure is not None:
            await self._fail(episode, failure)
            return
        last = episode.progress.last
        assert last is not None
        episode.state = EpisodeState.READY if last.stop_reason is None else EpisodeState.STOPPED

    async def _evaluate(self, episode: _OpenEpisode) -> None:
        failure = await self.executor.perform(episode.job, Stage.EVAL)
        if failure is not None:
            await self._fail(episode, failure)
            return
        episode.result = episode.job.result(JobState.DONE)
        episode.state = EpisodeState.GRADED
        self._release(episode)

    async def _fail(self, episode: _OpenEpisode, failure: Failure) -> None:
        await self.executor.collect(episode.job)
        self._set_failed(episode, failure)

    def _set_failed(self, episode: _OpenEpisode, failure: Failure) -> None:
        self.failures += 1
        self.internal_errors += failure.kind is FailureKind.INTERNAL
        episode.job.attempt.failure = failure
        episode.result = episode.job.result(JobState.FAILED)
        episode.state = EpisodeState.FAILED
        self._release(episode)

    # Closing.

    def _release(self, episode: _OpenEpisode) -> asyncio.Task[None]:
        """Close the environment, then release its slot in the scheduler."""
        if episode.closing is None:
            episode.closing = asyncio.create_task(self._close(episode))
        return episode.closing

    async def _close_model(self, episode: _OpenEpisode) -> None:
        """Close the model endpoint of the episode."""
        if episode.model is not None:
            self._models.pop(episode.model.key, None)
            await episode.model.aclose()

    async def _close(self, episode: _OpenEpisode) -> None:
        await self._close_model(episode)
        self.agent.forget(episode.job.id)
        if not await self.executor.close(episode.job):
            self.engine.close_failures += 1
        self.engine.release(episode.guest)

    def _end(self, episode: _OpenEpisode) -> asyncio.Task[None]:
        del self._open[episode.request.id]
        task = asyncio.create_task(self._stop_and_release(episode))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)
        return task

    async def _stop_and_release(self, episode: _OpenEpisode) -> None:
        running = [task for task in (episode.work, episode.idle_watch) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await self._release(episode)

    async def _close_when_idle(self, episode: _OpenEpisode) -> None:
        """Close the episode when it has been idle for too long."""
        while True:
            if episode.state.busy and episode.work is not None:
                await asyncio.wait([episode.work])
                episode.last_used = self.clock.monotonic()
            if episode.model is not None:
                now = self.clock.monotonic()
                episode.last_used = max(
                    episode.last_used, now if episode.model.calls else episode.model.last_used
                )
            seconds_left = episode.last_used + episode.idle_s - self.clock.monotonic()
            if seconds_left <= 0:
                break
            await self.clock.sleep(seconds_left)
        log.warning("episode %s: no request for %g s; it is closed", episode.request.id, episode.idle_s)
        episode.idle_watch = None  # this task itself, which must not be cancelled
        self._end(episode)

    # Helpers.

    def _start_work(self, episode: _OpenEpisode, work: Coroutine[Any, Any, None]) -> None:
        episode.work = asyncio.create_task(work)
        episode.work.add_done_callback(partial(self._work_ended, episode))

    def _work_ended(self, episode: _OpenEpisode, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.internal_errors += 1
            log.critical("episode %s failed because of a bug", episode.request.id, exc_info=error)
            self._set_failed(episode, _BUG)

    async def _wait_and_view(
        self, episode: _OpenEpisode, wait_s: float, *, prompt: bool = False
    ) -> EpisodeView:
        episode.last_used = self.clock.monotonic()
        if episode.state.busy and episode.work is not None and wait_s > 0:
            try:
                async with self.clock.timeout(wait_s):
                    await asyncio.wait([episode.work])
            except TimeoutError:
                pass  # the returned state shows that the operation is still running
            self._get(episode.request.id)  # raises NotFound if the episode was closed meanwhile
            episode.last_used = self.clock.monotonic()
        return EpisodeView(
            id=episode.request.id,
            environment=episode.request.environment,
            task_id=episode.job.task.id,
            state=episode.state,
            steps=episode.steps,
            prompt=episode.prompt if prompt else None,
            last=episode.progress.last,
            failure=episode.job.attempt.failure,
            result=episode.result,
        )

    def _get(self, name: str) -> _OpenEpisode:
        if name not in self._open:
            hint = "it was closed, was idle for too long, or ended with the service before a restart"
            raise NotFound(f"no episode {name!r}", hint=hint)
        return self._open[name]

    def _check_step(self, episode: _OpenEpisode, step: StepRequest) -> None:
        _check_state(episode, EpisodeState.READY)
        if step.step is not None and step.step != episode.steps:
            raise OutOfOrder(f"the next step is {episode.steps}, not {step.step}")
        if episode.by_tokens is not None and episode.by_tokens == isinstance(step, CallStep):
            raise OutOfOrder(
                "an episode is driven by tokens or by tool calls",
                hint="after tool calls the service does not know the context",
            )
        if isinstance(step, TokenStep) and len(step.ids) > episode.progress.room:
            raise InputError(
                f"{len(step.ids)} tokens do not fit: the context has room for {episode.progress.room}"
            )


_BUG = Failure(
    kind=FailureKind.INTERNAL,
    stage=Stage.RUN,
    message="the service has a bug",
    hint="the service's log has the traceback",
)


def _check_state(episode: _OpenEpisode, *allowed: EpisodeState) -> None:
    if episode.state not in allowed:
        raise OutOfOrder(f"the episode is {episode.state}; it must be {' or '.join(allowed)}")
