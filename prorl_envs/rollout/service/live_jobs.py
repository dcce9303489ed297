"""Views of unfinished jobs."""

import heapq
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from prorl_envs.clock import Clock
from prorl_envs.env.node import MemoryUse
from prorl_envs.rollout.api.dashboard import JobLine, JobPage
from prorl_envs.rollout.api.errors import NotFound
from prorl_envs.rollout.api.types import JobState, Result
from prorl_envs.rollout.episode.engine import Engine
from prorl_envs.rollout.episode.job import Job


@dataclass(eq=False)
class LiveJobs:
    """Unfinished jobs of a service.

    Args:
        engine: runs the jobs.
        memory: returns the recent memory use of sandboxes.
        clock: measures how long stages run.
    """

    engine: Engine
    memory: Callable[[], MemoryUse]
    clock: Clock

    def running(self, limit: int) -> list[JobLine]:
        """Return at most `limit` jobs: those whose stage has been running longest, longest first."""
        jobs = (self.engine.jobs[job] for job in self.engine.running)
        return [self._line(job) for job in heapq.nsmallest(limit, jobs, key=lambda job: job.started_at)]

    def page(self, *, prefix: str = "", states: Collection[JobState] = (), limit: int = 100) -> JobPage:
        """Return unfinished jobs.

        Args:
            prefix: return only jobs whose id starts with this prefix.
            states: return only jobs in these states; empty for all.
            limit: maximum number of jobs.
        """
        jobs, scheduler = self.engine.jobs, self.engine.scheduler

        def select() -> Iterator[Job]:
            running = self.engine.running
            for job in chain(running, (job for job in jobs if job not in running)):
                state = scheduler.state(job)
                if state is not None and job.startswith(prefix) and (not states or state in states):
                    yield jobs[job]

        selected = select()
        lines = [self._line(job) for job in islice(selected, limit)]
        unfiltered = not prefix and not states  # counting all jobs needs no iteration then
        return JobPage(jobs=lines, total=len(jobs) if unfiltered else len(lines) + sum(1 for _ in selected))

    def partial(self, job: str) -> Result:
        """Return the partial result of an unfinished job. It is never stored and has no reward.

        Raises:
            NotFound: the job is not known, or has a result.
        """
        known, state = self.engine.jobs.get(job), self.engine.scheduler.state(job)
        if known is None or state is None:
            raise NotFound(f"no unfinished job {job!r}", hint="a finished job has a result")
        return known.result(state)

    def _line(self, job: Job) -> JobLine:
        active, now = job.id in self.engine.running, self.clock.monotonic()
        ledger, environment = job.attempt.transcript.ledger, job.attempt.environment
        sandbox = None if environment is None else environment.sandbox_id
        return JobLine(
            id=job.id,
            group_id=job.request.id,
            environment=job.request.environment,
            task_id=job.task.id,
            state=self.engine.scheduler.state(job.id) or JobState.CANCELLED,
            active=active,
            attempts=job.attempts,
            since_s=now - (job.started_at if active else job.waiting_since),
            turns=0 if ledger is None else ledger.turns,
            tokens=0 if ledger is None else len(ledger),
            node=job.node,
            memory_bytes=self.memory().busy.get(sandbox) if sandbox else None,
        )
