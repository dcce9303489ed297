"""Job engine: carries out the scheduler's decisions and reports the outcomes to the scheduler.

Everything happens in one event loop, so an event and the decisions that follow it are never interleaved with
another event. The engine owns every task it starts; `settled` returns when none is left.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from prorl_envs.clock import Clock
from prorl_envs.env.base import Task
from prorl_envs.errors import FailureKind
from prorl_envs.rollout.agent import tracing
from prorl_envs.rollout.api.errors import Unavailable
from prorl_envs.rollout.api.interactive import StepRequest
from prorl_envs.rollout.api.types import Failure, GroupRequest, JobState, Result, Stage
from prorl_envs.rollout.api.views import Pause
from prorl_envs.rollout.episode.job import Job
from prorl_envs.rollout.scheduling.actions import AdmitExternal, Close, Decision, Finish, Interrupt, Start
from prorl_envs.rollout.scheduling.fair_queue import COMMON, Share
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.rollout.scheduling.scheduler import Scheduler
from prorl_envs.rollout.store.base import Store, StoredGroup

log = logging.getLogger(__name__)

#: Seconds between two tries to write to a store that is unavailable.
STORE_PAUSE_S = 1.0


class StageExecutor(Protocol):
    """Interface that carries out the stages that the engine starts, on the node named by `episode.node`:
    `Worker` for this machine, `Fleet` for other nodes."""

    async def perform(self, episode: Job, stage: Stage) -> Failure | None:
        """Carry out one stage and return its failure, or None. Returns only when no part of the stage runs
        any more, also after a cancellation."""
        ...

    async def step(self, episode: Job, request: StepRequest | None) -> Failure | None:
        """Take a step of an episode that its caller drives, and return its failure, or None. The outcome is
        the attempt's report. Without a request, render the prompt; that comes before the first step."""
        ...

    async def collect(self, episode: Job) -> None:
        """Fetch the attempt's partial result. Never raises; missing parts are omitted."""
        ...

    async def close(self, episode: Job) -> bool:
        """Close the attempt's environment. Return whether it closed without an error."""
        ...


class Engine:
    """The unfinished jobs, and the asyncio tasks that work on them.

    Args:
        scheduler: makes all decisions.
        crew: carries stages out.
        store: keeps results.
        clock: measures waiting.
        announce: called with each result when it is stored, in the order of the cursors.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        crew: StageExecutor,
        store: Store,
        clock: Clock,
        announce: Callable[[Result], None],
    ) -> None:
        self.scheduler = scheduler
        self.finished: Counter[JobState] = Counter()
        self.failures: Counter[FailureKind] = Counter()
        self.unfinished_of: Counter[str] = Counter()  # by the first part of the id
        self.retries = 0
        self.close_failures = 0
        self.internal_errors = 0
        self._crew = crew
        self._store = store
        self._clock = clock
        self._announce = announce
        self._freed: list[Callable[[], None]] = []
        self._episodes: dict[str, Job] = {}
        self._stages: dict[str, asyncio.Task[Failure | None]] = {}
        self._records: dict[str, asyncio.Task[None]] = {}
        self._grants: dict[str, asyncio.Future[str]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leaving = False  # on shutdown: unfinished jobs stay unfinished, for the next start

    def on_free(self, notify: Callable[[], None]) -> None:
        """Call `notify` whenever a job has left the engine."""
        self._freed.append(notify)

    def admit(
        self, request: GroupRequest, task: Task, *, batch_id: str | None = None, share: Share = COMMON
    ) -> None:
        """Admit a new group.

        Args:
            batch_id: the batch that starts the group, if any; `share`: the share that its jobs belong to.
        """
        now = self._clock.monotonic()
        samples = range(request.samples)
        self._admit([Job(request, sample, task, now, batch_id=batch_id) for sample in samples], share)

    def readmit(
        self, group: StoredGroup, task: Task, samples: Iterable[int], *, share: Share = COMMON
    ) -> None:
        """Admit jobs that an earlier service accepted and did not finish, each with its used attempts."""
        now, attempts, failures = self._clock.monotonic(), group.attempts, group.failures
        started_by_batch = group.started_by_batch
        episodes = [
            Job(group.request, i, task, now, attempts[i], failures[i], started_by_batch, readmitted=True)
            for i in samples
        ]
        self._admit(episodes, share)

    def _admit(self, episodes: Sequence[Job], share: Share) -> None:
        for episode in episodes:
            episode.span = tracing.begin_job(episode.id, episode.request.environment, episode.task.id)
        self._episodes.update((episode.id, episode) for episode in episodes)
        self.unfinished_of.update(_owner(episode.id) for episode in episodes)
        jobs = [(episode.id, episode.request.id) for episode in episodes]
        failures = {episode.id: episode.failures for episode in episodes if episode.failures}
        self._apply(self.scheduler.submit(jobs, failures, share))

    def give_up(self, result: Result) -> None:
        """Record the result of a job that will not be started again."""
        self._records[result.job_id] = self._spawn(self._record(result.job_id, result))

    def pause(self, mode: Pause) -> None:
        """Hold jobs back until `resume`."""
        self._apply(self.scheduler.pause(mode))

    def resume(self) -> None:
        """Let held jobs continue."""
        self._apply(self.scheduler.resume())

    def resize(self, limits: StageLimits) -> None:
        """Change the stage limits of this machine."""
        self._apply(self.scheduler.resize(limits))

    def join(self, node: str, limits: StageLimits) -> None:
        """Add a node that takes jobs.

        Raises:
            ValueError: a node with this name exists.
        """
        self._apply(self.scheduler.join(node, limits))

    def lost(self, node: str, failure: Failure) -> None:
        """Remove a lost node. The executor fails the stages that ran there with the same failure."""
        for job in self.scheduler.waiting_on(node):
            self._episodes[job].attempt.failure = failure
        self._apply(self.scheduler.lost(node))

    def admit_jobs(self, node: str, *, jobs: bool) -> None:
        """Stop or resume sending further jobs to a node.

        Raises:
            KeyError: there is no such node.
        """
        self._apply(self.scheduler.admit(node, jobs=jobs))

    def attempts(self, job: str) -> int:
        """Return the number of times that an unfinished job was started."""
        episode = self._episodes.get(job)
        return episode.attempts if episode else 0

    @property
    def episodes(self) -> Mapping[str, Job]:
        """Jobs that have not left the engine, by id, in order of arrival. Read-only."""
        return self._episodes

    @property
    def running(self) -> Collection[str]:
        """Ids of the jobs that have a stage running."""
        return self._stages.keys()

    async def cancel(self, jobs: Iterable[str]) -> None:
        """Cancel jobs, and return once their results are stored. Their sandboxes are closed after that."""
        jobs = list(jobs)
        for job in jobs:
            self._apply(self.scheduler.cancel(job))
        if records := [self._records[job] for job in jobs if job in self._records]:
            await asyncio.wait(records)

    def cancel_all(self) -> None:
        """Stop every job. With a durable store the jobs are not cancelled, but left for the next start."""
        self._leaving = self._store.durable
        for job in list(self._episodes):
            self._apply(self.scheduler.cancel(job))

    async def reserve(self, guest: str, *, here: bool) -> str:
        """Return once an external holder may start its environment. A cancelled call releases its place.

        Args:
            guest: name of the holder.
            here: only on this machine.

        Returns:
            name of the node.
        """
        grant = self._grants[guest] = asyncio.get_running_loop().create_future()
        self._apply(self.scheduler.reserve(guest, here=here))
        try:
            node: str = await grant
            return node
        except asyncio.CancelledError:
            self.release(guest)
            raise

    def prepared(self, guest: str) -> None:
        """Record that an external holder's environment has started, or has failed to start."""
        self._apply(self.scheduler.prepared(guest))

    def release(self, guest: str) -> None:
        """Release the place of an external holder whose environment is closed. Idempotent."""
        self._grants.pop(guest, None)
        self._apply(self.scheduler.release(guest))

    async def settled(self) -> None:
        """Return once no job is left and no task runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)
            await asyncio.sleep(0)  # let the callbacks of finished tasks start the next tasks

    def _apply(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Start():
                    episode = self._episodes[decision.job]
                    episode.node = decision.node
                    self._start_stage(episode, decision.stage)
                case Interrupt():
                    self._stages[decision.job].cancel()
                case Finish():
                    self._finish(self._episodes[decision.job], decision.state)
                case Close():
                    self._spawn(self._close(self._episodes[decision.job]))
                case AdmitExternal():
                    grant = self._grants.pop(decision.guest)
                    if not grant.done():  # otherwise it was just cancelled and releases its place
                        grant.set_result(decision.node)

    def _start_stage(self, episode: Job, stage: Stage) -> None:
        episode.started_at = self._clock.monotonic()
        episode.queued_s += episode.started_at - episode.waiting_since
        episode.attempts += stage is Stage.INIT
        task = self._spawn(self._perform(episode, stage))
        self._stages[episode.id] = task
        task.add_done_callback(partial(self._stage_ended, episode))

    async def _perform(self, episode: Job, stage: Stage) -> Failure | None:
        with tracing.in_stage(episode.id, episode.span, stage, episode.attempts) as span:
            if stage is Stage.INIT:
                # A job that crashes every service that starts it must be detected, so its starts are stored
                # at once.
                at_once = episode.readmitted or episode.failures > 0
                await self._persist(
                    partial(self._store.started, episode.id, episode.failures, at_once=at_once)
                )
            failure = await self._crew.perform(episode, stage)
            if failure is not None:
                tracing.note_failure(span, failure)
            return failure

    def _stage_ended(self, episode: Job, task: asyncio.Task[Failure | None]) -> None:
        """Report the outcome of a stage to the scheduler."""
        del self._stages[episode.id]
        episode.waiting_since = self._clock.monotonic()
        if task.cancelled():  # by the engine, or because the event loop stops: counts as a cancellation
            self._apply(self.scheduler.cancel(episode.id))
            self._apply(self.scheduler.ended(episode.id))
        elif failure := task.result():
            episode.attempt.failure = failure
            self.internal_errors += failure.kind is FailureKind.INTERNAL
            self._apply(self.scheduler.failed(episode.id, retryable=failure.retryable))
        else:
            self._apply(self.scheduler.ended(episode.id))

    def _finish(self, episode: Job, state: JobState) -> None:
        if state is JobState.CANCELLED and self._leaving:
            tracing.end_job(episode.span, state, None, episode.attempts)
            self._forget_if_gone(episode.id)
            return
        self._records[episode.id] = self._spawn(self._conclude(episode, state))

    async def _conclude(self, episode: Job, state: JobState) -> None:
        """Build the job's result and record it."""
        await self._crew.collect(episode)
        if state is JobState.CANCELLED:
            episode.cancelled()
        result = episode.result(state)
        tracing.end_job(episode.span, state, result.reward, result.attempts)
        await self._record(episode.id, result)

    async def _record(self, job: str, result: Result) -> None:
        try:
            kept = await self._persist(partial(self._store.record, result))
        except Unavailable as error:
            log.error("the result of %s is lost, and the next start does it again: %s", job, error)
            self._forget_if_gone(job)
            return
        self.finished[result.state] += 1
        if result.failure is not None:
            self.failures[result.failure.kind] += 1
        self._announce(kept)
        self._forget_if_gone(job)

    async def _persist[T](self, write: Callable[[], Awaitable[T]]) -> T:
        """Write to the store, and retry while it is unavailable. Meanwhile the job holds its place, so a full
        disk stops the service from progressing but loses nothing.

        Raises:
            Unavailable: the store is still unavailable when the service shuts down.
        """
        while True:
            try:
                return await write()
            except Unavailable as error:
                if self._leaving:
                    raise
                log.error("trying again in %g s: %s", STORE_PAUSE_S, error)
            await self._clock.sleep(STORE_PAUSE_S)

    async def _close(self, episode: Job) -> None:
        """Close the attempt's environment, after the job's result is stored."""
        if record := self._records.get(episode.id):
            await asyncio.wait([record])
        if not await self._crew.close(episode):
            self.close_failures += 1
        decisions = self.scheduler.closed(episode.id)
        if episode.id in self.scheduler:  # the job gets another attempt
            episode.new_attempt()
            episode.waiting_since = self._clock.monotonic()
            self.retries += 1
        self._apply(decisions)
        self._forget_if_gone(episode.id)

    def _forget_if_gone(self, job: str) -> None:
        if job in self.scheduler:
            return
        self._records.pop(job, None)
        if self._episodes.pop(job, None) is not None:
            owner = _owner(job)
            self.unfinished_of[owner] -= 1
            if not self.unfinished_of[owner]:
                del self.unfinished_of[owner]
        for notify in self._freed:
            notify()

    def _spawn[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.internal_errors += 1
            log.critical("the service met a bug", exc_info=error)


def _owner(job: str) -> str:
    """Return the first part of an id, including its first slash."""
    return job.partition("/")[0] + "/"
