"""Job engine: carries out the scheduler's decisions and reports the outcomes to the scheduler.

The engine runs in one event loop, so it carries out all decisions of an event before it handles the next
event. It owns every asyncio task that it starts; `settled` returns when all of them have finished.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from prorl_envs.clock import Clock
from prorl_envs.env.base import Task
from prorl_envs.errors import FailureKind
from prorl_envs.model.types import Sampled
from prorl_envs.rollout.agent import tracing
from prorl_envs.rollout.agent.agent_loop import TurnJournal
from prorl_envs.rollout.api.errors import NotFound, Unavailable
from prorl_envs.rollout.api.interactive import StepRequest
from prorl_envs.rollout.api.types import Failure, GroupRequest, JobState, Result, Stage, split_job_id
from prorl_envs.rollout.episode.job import Job
from prorl_envs.rollout.scheduling.fair_queue import COMMON, Share
from prorl_envs.rollout.scheduling.scheduler import (
    AdmitExternal,
    Close,
    Decision,
    Finish,
    Interrupt,
    Scheduler,
    Start,
)
from prorl_envs.rollout.store.base import StoredGroup
from prorl_envs.rollout.store.sql import SqlStore

log = logging.getLogger(__name__)

#: Seconds before a failed write to an unavailable store is tried again.
STORE_PAUSE_S = 1.0


class StageExecutor(Protocol):
    """Interface that runs stages on the node `job.node`: `Worker` on this machine, `Fleet` on other nodes."""

    async def perform(self, job: Job, stage: Stage) -> Failure | None:
        """Run one stage. Return its failure, or None. Even if it is cancelled, this returns only when no part
        of the stage runs any more."""
        ...

    async def step(self, job: Job, request: StepRequest | None) -> Failure | None:
        """Run a step of an episode that its caller drives. Return its failure, or None. The attempt's
        `progress` contains the outcome. Without a request, render the prompt, which must precede the first
        step."""
        ...

    async def collect(self, job: Job) -> None:
        """Fetch the attempt's partial result. Never raises; missing parts are omitted."""
        ...

    async def close(self, job: Job) -> bool:
        """Close the attempt's environment. Return True if it closed without an error."""
        ...

    async def forget(self, group: str) -> None:
        """Free the checkpoint from which the jobs of a group have started. Never raises."""
        ...


@dataclass(eq=False)
class Engine:
    """Engine of unfinished jobs, with the asyncio tasks that work on them.

    Args:
        scheduler: makes all decisions.
        executor: runs the stages.
        store: stores the results.
        clock: measures waiting times.
        announce: called with each result when it is stored, in the order of the cursors.
    """

    scheduler: Scheduler
    executor: StageExecutor
    store: SqlStore
    clock: Clock
    announce: Callable[[Result], None]
    finished: Counter[JobState] = field(default_factory=Counter, init=False)
    failures: Counter[FailureKind] = field(default_factory=Counter, init=False)
    #: Number of unfinished jobs by the first part of the id, see `_owner`.
    unfinished_of: Counter[str] = field(default_factory=Counter, init=False)
    retries: int = field(default=0, init=False)
    close_failures: int = field(default=0, init=False)
    internal_errors: int = field(default=0, init=False)
    #: Called whenever a job leaves the engine.
    on_free: Callable[[], None] = field(default=lambda: None, init=False)
    _jobs: dict[str, Job] = field(default_factory=dict, init=False)
    _stages: dict[str, asyncio.Task[Failure | None]] = field(default_factory=dict, init=False)
    _records: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _grants: dict[str, asyncio.Future[str]] = field(default_factory=dict, init=False)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set, init=False)
    #: True during a shutdown that keeps unfinished jobs for the next start.
    _leaving: bool = field(default=False, init=False)

    def admit(
        self, request: GroupRequest, task: Task, *, batch_id: str | None = None, share: Share = COMMON
    ) -> None:
        """Admit a new group.

        Args:
            batch_id: the batch that starts the group, if any; `share`: scheduling share of the group's jobs.
        """
        now = self.clock.monotonic()
        samples = range(request.samples)
        self._admit([Job(request, sample, task, now, batch_id=batch_id) for sample in samples], share)

    def readmit(
        self, group: StoredGroup, task: Task, samples: Iterable[int], *, share: Share = COMMON
    ) -> None:
        """Admit jobs that an earlier service accepted and did not finish. Their earlier attempts count."""
        now = self.clock.monotonic()
        jobs = [Job(group.request, i, task, now, batch_id=group.started_by_batch) for i in samples]
        for job in jobs:
            job.readmitted, job.attempts = True, group.jobs[job.sample].attempts
            job.interrupted = job.attempts - group.failures[job.sample]
        self._admit(jobs, share)

    def _admit(self, jobs: Sequence[Job], share: Share) -> None:
        for job in jobs:
            job.span = tracing.begin_job(job.id, job.request.environment, job.task.id)
        self._jobs.update((job.id, job) for job in jobs)
        self.unfinished_of.update(_owner(job.id) for job in jobs)
        pairs = [(job.id, job.request.id) for job in jobs]
        failures = {job.id: job.attempts - job.interrupted for job in jobs}
        held = [job.id for job in jobs if not job.is_trunk] if jobs[0].is_trunk else []
        self.apply(self.scheduler.submit(pairs, failures, share, held=held))

    def give_up(self, job: Job) -> None:
        """Record the failure of a stored job that cannot be started again."""
        failed = self._conclude(job, Finish(job.id, JobState.FAILED, Stage.INIT))
        self._records[job.id] = self._spawn(failed)

    def lost(self, node: str, failure: Failure) -> None:
        """Remove a lost node. Jobs that wait there fail with this failure. For stages that run there, the
        executor returns the same failure."""
        for job_id in self.scheduler.waiting_on(node):
            self._jobs[job_id].attempt.failure = failure
        self.apply(self.scheduler.lost(node))

    @property
    def jobs(self) -> Mapping[str, Job]:
        """Jobs that have not left the engine, by id, in order of arrival. Read-only."""
        return self._jobs

    @property
    def running(self) -> Collection[str]:
        """Ids of the jobs with a running stage."""
        return self._stages.keys()

    async def cancel(self, jobs: Iterable[str]) -> None:
        """Cancel jobs, and return once their results are stored. Their sandboxes are closed after that."""
        jobs = list(jobs)
        for job_id in reversed(jobs):  # a trunk last, since its end lets held jobs start
            self.apply(self.scheduler.cancel(job_id))
        if records := [self._records[job_id] for job_id in jobs if job_id in self._records]:
            await asyncio.wait(records)

    def cancel_all(self) -> None:
        """Stop every job. With a durable store they get no result, so that the next start resumes them."""
        self._leaving = self.store.durable
        for job_id in reversed(list(self._jobs)):
            self.apply(self.scheduler.cancel(job_id))

    async def reserve(self, guest: str, *, here: bool) -> str:
        """Wait until a guest may start its environment. If this call is cancelled, it releases the guest.

        Args:
            guest: name of the guest, see `Scheduler`.
            here: place the guest on this machine only.

        Returns:
            Name of the node on which the guest may start its environment.
        """
        grant = self._grants[guest] = asyncio.get_running_loop().create_future()
        self.apply(self.scheduler.reserve(guest, here=here))
        try:
            node: str = await grant
            return node
        except asyncio.CancelledError:
            self.release(guest)
            raise

    def release(self, guest: str) -> None:
        """Release the slot of a guest whose environment is closed. Idempotent."""
        self._grants.pop(guest, None)
        self.apply(self.scheduler.release(guest))

    async def settled(self) -> None:
        """Wait until all jobs have left the engine and no task runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)
            await asyncio.sleep(0)  # let the callbacks of finished tasks start the next tasks

    def apply(self, decisions: Iterable[Decision]) -> None:
        """Carry out decisions that an event of the scheduler has returned."""
        for decision in decisions:
            match decision:
                case Start():
                    job = self._jobs[decision.job]
                    job.node, job.attempts = decision.node, job.interrupted + decision.attempt
                    self._start_stage(job, decision.stage)
                case Interrupt():
                    self._stages[decision.job].cancel()
                case Finish() if self._leaving and decision.state is JobState.CANCELLED:
                    job = self._jobs[decision.job]
                    tracing.end_job(job.span, decision.state, None, job.attempts)
                    self._forget_if_gone(job.id)
                case Finish():
                    concluding = self._conclude(self._jobs[decision.job], decision)
                    self._records[decision.job] = self._spawn(concluding)
                case Close():
                    self._spawn(self._close(self._jobs[decision.job]))
                case AdmitExternal():
                    grant = self._grants.pop(decision.guest)
                    if not grant.done():  # otherwise `reserve` was cancelled, and will release the guest
                        grant.set_result(decision.node)

    def _start_stage(self, job: Job, stage: Stage) -> None:
        job.started_at = self.clock.monotonic()
        job.queued_s += job.started_at - job.waiting_since
        task = self._spawn(self._perform(job, stage))
        self._stages[job.id] = task
        task.add_done_callback(partial(self._stage_ended, job, stage))

    async def _perform(self, job: Job, stage: Stage) -> Failure | None:
        with tracing.in_stage(job.id, job.span, stage, job.attempts) as span:
            if stage is Stage.INIT:
                # Each start is stored at once, to detect a job that crashes every service that starts it.
                failures = job.attempts - job.interrupted - 1
                at_once = job.readmitted or failures > 0
                await self._persist(
                    partial(self.store.started, job.id, job.attempts, failures, at_once=at_once)
                )
                answers = await self._persist(partial(self.store.turns, job.id)) if job.attempts > 1 else {}
                job.journal = TurnJournal(answers, partial(self.store.note_turn, job.id))
                if (start := job.request.start) is not None and not job.recorded:
                    try:
                        job.recorded = await self.answers(start.job_id)
                    except NotFound as error:
                        return Failure(kind=FailureKind.ENVIRONMENT, stage=stage, message=error.message)
            failure = await self.executor.perform(job, stage)
            if failure is not None:
                tracing.note_failure(span, failure)
            return failure

    async def answers(self, job_id: str) -> dict[bytes, Sampled]:
        """Return the answers of a job, finished or not, and of the jobs with whose turns it starts.

        Raises:
            NotFound: one of the jobs is not stored.
        """
        answers: dict[bytes, Sampled] = {}
        name: str | None = job_id
        while name is not None:
            answers |= await self._persist(partial(self.store.turns, name))
            group_id, sample = split_job_id(name)
            request = (await self._persist(partial(self.store.group, group_id))).request
            if sample > 0 and request.branch_at > 0:
                name = request.job_ids[0]
            else:
                name = request.start.job_id if request.start else None
        return answers

    def _stage_ended(self, job: Job, stage: Stage, task: asyncio.Task[Failure | None]) -> None:
        """Report the outcome of a stage to the scheduler."""
        del self._stages[job.id]
        job.waiting_since = self.clock.monotonic()
        if task.cancelled():  # by the engine, or because the event loop stops; both count as a cancellation
            self.apply(self.scheduler.cancel(job.id))
            self.apply(self.scheduler.ended(job.id))
        elif failure := task.result():
            job.attempt.failure = failure
            self.internal_errors += failure.kind is FailureKind.INTERNAL
            self.apply(self.scheduler.failed(job.id, retryable=failure.retryable))
        elif stage is Stage.RUN and not job.has_stopped:
            self.apply(self.scheduler.branched(job.id))
        else:
            self.apply(self.scheduler.ended(job.id))

    async def _conclude(self, job: Job, finish: Finish) -> None:
        """Build the result of a finished job and record it."""
        await self.executor.collect(job)
        if finish.state is JobState.CANCELLED:
            message = "a client cancelled this job"
            job.attempt.failure = Failure(kind=FailureKind.CANCELLED, stage=finish.stage, message=message)
        result = job.result(finish.state)
        tracing.end_job(job.span, result.state, result.reward, result.attempts)
        try:
            stored = await self._persist(partial(self.store.record, result))
        except Unavailable as error:
            log.error("the result of job %s is lost; the next start runs it again: %s", result.job_id, error)
        else:
            self.finished[result.state] += 1
            if result.failure is not None:
                self.failures[result.failure.kind] += 1
            self.announce(stored)
        self._forget_if_gone(result.job_id)

    async def _persist[T](self, write: Callable[[], Awaitable[T]]) -> T:
        """Write to the store, and retry while it is unavailable. Meanwhile the job keeps its slot. So a full
        disk stops the service's progress, but no result is lost.

        Raises:
            Unavailable: the store is still unavailable when the service shuts down.
        """
        while True:
            try:
                return await write()
            except Unavailable as error:
                if self._leaving:
                    raise
                log.debug("trying again in %g s: %s", STORE_PAUSE_S, error)
            await self.clock.sleep(STORE_PAUSE_S)

    async def _close(self, job: Job) -> None:
        """Close the attempt's environment, after the job's result, if there is one, is stored."""
        if record := self._records.get(job.id):
            await asyncio.wait([record])
        if not await self.executor.close(job):
            self.close_failures += 1
        decisions = self.scheduler.closed(job.id)
        if job.id in self.scheduler:  # the job gets another attempt
            job.new_attempt()
            job.waiting_since = self.clock.monotonic()
            self.retries += 1
        self.apply(decisions)
        self._forget_if_gone(job.id)

    def _forget_if_gone(self, job_id: str) -> None:
        if job_id in self.scheduler:
            return
        self._records.pop(job_id, None)
        if (job := self._jobs.pop(job_id, None)) is not None:
            if job.request.branch_at and not self._jobs.keys() & job.request.job_ids:
                self._spawn(self.executor.forget(job.request.id))
            owner = _owner(job_id)
            self.unfinished_of[owner] -= 1
            if not self.unfinished_of[owner]:
                del self.unfinished_of[owner]
        self.on_free()

    def _spawn[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.internal_errors += 1
            log.critical("the service has a bug", exc_info=error)


def _owner(job_id: str) -> str:
    """Return the first part of an id, including its first slash: for jobs of tenants, the tenant's prefix."""
    return job_id.partition("/")[0] + "/"
