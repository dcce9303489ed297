"""Carries jobs through the stages: does what the scheduler decides and tells it what came of it.

Everything happens in one event loop, so an event and the decisions that follow it are never interleaved
with another event. The engine owns every task it starts; `settled` returns when none is left.
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
from prorl_envs.rollout import tracing
from prorl_envs.rollout.decisions import Close, Decision, Finish, Grant, Interrupt, Start
from prorl_envs.rollout.episode import Episode
from prorl_envs.rollout.errors import Unavailable
from prorl_envs.rollout.fair_queue import COMMON, Share
from prorl_envs.rollout.placement import Limits
from prorl_envs.rollout.scheduler import Pause, Scheduler
from prorl_envs.rollout.store import Store, StoredGroup
from prorl_envs.rollout.types import Failure, GroupRequest, JobState, Result, Stage

log = logging.getLogger(__name__)

#: Seconds between two tries to write to a store that is unavailable.
STORE_PAUSE_S = 1.0


class Crew(Protocol):
    """Carries out what the engine starts, on the node that `episode.node` names: a `Worker` on this machine,
    past it a `Fleet`, which tells the node."""

    async def perform(self, episode: Episode, stage: Stage) -> Failure | None:
        """Carry out one stage; what failed, or None. Returns, also where it is cancelled, only when nothing
        of it runs any more."""
        ...

    async def collect(self, episode: Episode) -> None:
        """Have at hand what the attempt has come to by now. Does not fail: what cannot be had is left out."""
        ...

    async def close(self, episode: Episode) -> bool:
        """Close the attempt's environment; whether that went in order."""
        ...


class Engine:
    """The jobs that are not finished, and the tasks that work on them.

    Args:
        scheduler: decides.
        crew: carries stages out.
        store: keeps results.
        clock: measures waiting.
        announce: called with each result when it is kept, in the order of their cursors.
        freed: called when a job is gone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        crew: Crew,
        store: Store,
        clock: Clock,
        announce: Callable[[Result], None],
        freed: Callable[[], None],
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
        self._freed = freed
        self._episodes: dict[str, Episode] = {}
        self._stages: dict[str, asyncio.Task[Failure | None]] = {}
        self._records: dict[str, asyncio.Task[None]] = {}
        self._grants: dict[str, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leaving = False  # what is unfinished stays so, for the next start

    def admit(
        self, request: GroupRequest, task: Task, *, batch_id: str | None = None, share: Share = COMMON
    ) -> None:
        """Take a new group in.

        Args:
            batch_id: the batch that begins it, if any; `share`: of whom it is.
        """
        now = self._clock.monotonic()
        samples = range(request.samples)
        self._admit([Episode(request, sample, task, now, batch_id=batch_id) for sample in samples], share)

    def readmit(
        self, group: StoredGroup, task: Task, samples: Iterable[int], *, share: Share = COMMON
    ) -> None:
        """Take jobs in that an earlier service began or did not come to, each with what it used up."""
        now, attempts, failures = self._clock.monotonic(), group.attempts, group.failures
        begun_by = group.begun_by
        episodes = [
            Episode(group.request, i, task, now, attempts[i], failures[i], begun_by, readmitted=True)
            for i in samples
        ]
        self._admit(episodes, share)

    def _admit(self, episodes: Sequence[Episode], share: Share) -> None:
        for episode in episodes:
            episode.span = tracing.begin_job(episode.id, episode.request.environment, episode.task.id)
        self._episodes.update((episode.id, episode) for episode in episodes)
        self.unfinished_of.update(_owner(episode.id) for episode in episodes)
        jobs = [(episode.id, episode.request.id) for episode in episodes]
        failures = {episode.id: episode.failures for episode in episodes if episode.failures}
        self._apply(self.scheduler.submit(jobs, failures, share))

    def give_up(self, result: Result) -> None:
        """Record the result of a job that is not started again."""
        self._records[result.job_id] = self._spawn(self._record(result.job_id, result))

    def pause(self, mode: Pause) -> None:
        """Hold jobs back until `resume`."""
        self._apply(self.scheduler.pause(mode))

    def resume(self) -> None:
        """Let jobs go on."""
        self._apply(self.scheduler.resume())

    def resize(self, limits: Limits) -> None:
        """Let more or less happen at once on this machine."""
        self._apply(self.scheduler.resize(limits))

    def join(self, node: str, limits: Limits) -> None:
        """A further node takes jobs.

        Raises:
            ValueError: one of this name is there.
        """
        self._apply(self.scheduler.join(node, limits))

    def lost(self, node: str, failure: Failure) -> None:
        """A node is gone. The crew ends what it carried out there with the same failure."""
        for job in self.scheduler.waiting_on(node):
            self._episodes[job].attempt.failure = failure
        self._apply(self.scheduler.lost(node))

    def admit_jobs(self, node: str, *, jobs: bool) -> None:
        """Let no further jobs go to a node, or let them again.

        Raises:
            KeyError: there is no such node.
        """
        self._apply(self.scheduler.admit(node, jobs=jobs))

    def attempts(self, job: str) -> int:
        """How often an unfinished job was started."""
        episode = self._episodes.get(job)
        return episode.attempts if episode else 0

    @property
    def episodes(self) -> Mapping[str, Episode]:
        """The jobs that are not gone, by id, in the order in which they came. Not to be changed."""
        return self._episodes

    @property
    def running(self) -> Collection[str]:
        """Those whose stage runs now."""
        return self._stages.keys()

    async def cancel(self, jobs: Iterable[str]) -> None:
        """End jobs, and return once their results are kept. Their sandboxes are closed after that."""
        jobs = list(jobs)
        for job in jobs:
            self._apply(self.scheduler.cancel(job))
        if records := [self._records[job] for job in jobs if job in self._records]:
            await asyncio.wait(records)

    def cancel_all(self) -> None:
        """End every job. Where the store is durable they are not cancelled, but left to the next start."""
        self._leaving = self._store.durable
        for job in list(self._episodes):
            self._apply(self.scheduler.cancel(job))

    async def reserve(self, guest: str) -> None:
        """Return once a guest may start its environment. Who is cancelled has no place any more."""
        grant = self._grants[guest] = asyncio.get_running_loop().create_future()
        self._apply(self.scheduler.reserve(guest))
        try:
            await grant
        except asyncio.CancelledError:
            self.release(guest)
            raise

    def prepared(self, guest: str) -> None:
        """A guest's environment has started, or has failed to."""
        self._apply(self.scheduler.prepared(guest))

    def release(self, guest: str) -> None:
        """A guest's environment is gone. Idempotent."""
        self._grants.pop(guest, None)
        self._apply(self.scheduler.release(guest))

    async def settled(self) -> None:
        """Return once no job is left and nothing runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)
            await asyncio.sleep(0)  # let the callbacks of what ended start what follows

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
                case Grant():
                    grant = self._grants.pop(decision.guest)
                    if not grant.done():  # else it was just cancelled, and gives its place back
                        grant.set_result(None)

    def _start_stage(self, episode: Episode, stage: Stage) -> None:
        episode.started_at = self._clock.monotonic()
        episode.queued_s += episode.started_at - episode.waiting_since
        episode.attempts += stage is Stage.INIT
        task = self._spawn(self._perform(episode, stage))
        self._stages[episode.id] = task
        task.add_done_callback(partial(self._stage_ended, episode))

    async def _perform(self, episode: Episode, stage: Stage) -> Failure | None:
        with tracing.in_stage(episode.id, episode.span, stage, episode.attempts) as span:
            if stage is Stage.INIT:
                # A job that ends every service it comes to has to be found out.
                at_once = episode.readmitted or episode.failures > 0
                await self._persist(
                    partial(self._store.started, episode.id, episode.failures, at_once=at_once)
                )
            failure = await self._crew.perform(episode, stage)
            if failure is not None:
                tracing.note_failure(span, failure)
            return failure

    def _stage_ended(self, episode: Episode, task: asyncio.Task[Failure | None]) -> None:
        """What a stage came to, as the scheduler's event."""
        del self._stages[episode.id]
        episode.waiting_since = self._clock.monotonic()
        if task.cancelled():  # by us, or by the end of the event loop: then it counts as a cancellation
            self._apply(self.scheduler.cancel(episode.id))
            self._apply(self.scheduler.ended(episode.id))
        elif failure := task.result():
            episode.attempt.failure = failure
            self.internal_errors += failure.kind is FailureKind.INTERNAL
            self._apply(self.scheduler.failed(episode.id, retryable=failure.retryable))
        else:
            self._apply(self.scheduler.ended(episode.id))

    def _finish(self, episode: Episode, state: JobState) -> None:
        if state is JobState.CANCELLED and self._leaving:
            tracing.end_job(episode.span, state, None, episode.attempts)
            self._forget_if_gone(episode.id)
            return
        self._records[episode.id] = self._spawn(self._conclude(episode, state))

    async def _conclude(self, episode: Episode, state: JobState) -> None:
        """Make the job's result and record it."""
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
        """Write, and try again until the disk takes it. Meanwhile the job holds its place, so a full disk
        brings the service to a halt and loses nothing.

        Raises:
            Unavailable: still so when the service leaves.
        """
        while True:
            try:
                return await write()
            except Unavailable as error:
                if self._leaving:
                    raise
                log.error("trying again in %g s: %s", STORE_PAUSE_S, error)
            await self._clock.sleep(STORE_PAUSE_S)

    async def _close(self, episode: Episode) -> None:
        """Close the attempt's environment, after its result is safe."""
        if record := self._records.get(episode.id):
            await asyncio.wait([record])
        if not await self._crew.close(episode):
            self.close_failures += 1
        decisions = self.scheduler.closed(episode.id)
        if episode.id in self.scheduler:  # another attempt
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
        self._freed()

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
    """What an id begins with, its first slash included."""
    return job.partition("/")[0] + "/"
