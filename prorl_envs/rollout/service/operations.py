"""Operator functions: views of unfinished jobs, and changes to a running service."""

import heapq
import logging
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

from prorl_envs.config import ServiceSettings
from prorl_envs.env.node import MemoryUse, NodeUse
from prorl_envs.errors import InputError
from prorl_envs.rollout.api.dashboard import JobLine, JobPage, LimitsRequest
from prorl_envs.rollout.api.errors import Conflict, NotFound
from prorl_envs.rollout.api.types import GroupRequest, JobState, Result, split_job_id
from prorl_envs.rollout.api.views import GroupView
from prorl_envs.rollout.episode.engine import Engine
from prorl_envs.rollout.episode.job import Job
from prorl_envs.rollout.monitoring.dashboard_state import DashboardSnapshot
from prorl_envs.rollout.scheduling.placement import StageLimits

if TYPE_CHECKING:
    from prorl_envs.rollout.service.service import RolloutService

log = logging.getLogger(__name__)

#: Number of running jobs that the dashboard shows.
SHOWN = 50


class Operations:
    """Operator functions of one service.

    Args:
        service: the service.
        engine: has its unfinished jobs.
        use: current use of the service's own machine; `memory`: recent memory use of its sandboxes.
    """

    def __init__(
        self,
        service: "RolloutService",
        engine: Engine,
        use: Callable[[], NodeUse],
        memory: Callable[[], MemoryUse],
    ) -> None:
        self._service = service
        self._engine = engine
        self._use = use
        self._memory = memory

    def now(self) -> DashboardSnapshot:
        """Return a snapshot of the service."""
        service = self._service
        running = (self._engine.episodes[job] for job in self._engine.running)
        longest = heapq.nsmallest(SHOWN, running, key=lambda episode: episode.started_at)
        return DashboardSnapshot(
            status=service.status(),
            attempts_limit=self._engine.scheduler.attempts,
            use=self._use(),
            memory=self._memory(),
            batches=service.batches.views(),
            nodes=service.fleet.views() if service.fleet is not None else [],
            running=[self._line(episode) for episode in longest],
        )

    def jobs(self, *, prefix: str = "", states: Collection[JobState] = (), limit: int = 100) -> JobPage:
        """Return unfinished jobs.

        Args:
            prefix: prefix of their ids.
            states: only jobs in these states; empty for all.
            limit: maximum number of jobs.
        """
        episodes, scheduler = self._engine.episodes, self._engine.scheduler

        def wanted() -> Iterator[Job]:
            running = self._engine.running
            for job in chain(running, (job for job in episodes if job not in running)):
                state = scheduler.state(job)
                if state is not None and job.startswith(prefix) and (not states or state in states):
                    yield episodes[job]

        found = wanted()
        lines = [self._line(episode) for episode in islice(found, limit)]
        whole = not prefix and not states
        return JobPage(jobs=lines, total=len(episodes) if whole else len(lines) + sum(1 for _ in found))

    def partial(self, job: str) -> Result:
        """Return the partial result of an unfinished job. It is never stored and has no reward.

        Raises:
            NotFound: the job is not known, or has a result.
        """
        episode, state = self._engine.episodes.get(job), self._engine.scheduler.state(job)
        if episode is None or state is None:
            raise NotFound(f"no job {job!r} is under way", hint="a finished one has a result")
        return episode.result(state)

    async def retry(self, job: str, *, quota: tuple[str, int] | None = None) -> GroupView:
        """Repeat a finished job as a group of its own; the existing result stays. Idempotent.

        Args:
            job: its task, limits and sampling are used again.
            quota: as of `RolloutService.submit`.

        Raises:
            NotFound: there is no such job.
            Conflict: it is not finished.
            QueueFull, Unavailable: as for a submission.
        """
        view = await self._service.job(job)
        if not view.state.final:
            raise Conflict(f"job {job!r} is not finished", hint="cancel it first")
        group_id, sample = split_job_id(job)
        asked = (await self._service.store.group(group_id)).request
        again = asked.model_dump(exclude_unset=True)
        again |= {"id": f"{group_id}:retry-{sample}", "samples": 1}
        again["metadata"] = {**asked.metadata, "retry_of": job}
        if asked.sampling.seed is not None:
            again["sampling"] = {**again["sampling"], "seed": asked.sampling.seed + sample}
        try:
            request = GroupRequest.model_validate(again)
        except ValueError as error:  # after several retries of retries the id is too long
            raise InputError(f"job {job!r} cannot be retried under an id of its own") from error
        return (await self._service.submit([request], quota=quota))[0]

    def resize(self, asked: LimitsRequest) -> None:
        """Change the concurrency limits until the service stops. Work above a lowered limit continues."""
        named = asked.model_dump(exclude_none=True)
        changed = self._service.settings.model_copy(update=named)
        log.warning("limits: %s", ", ".join(f"{name} {value}" for name, value in named.items()))
        self._service.settings = ServiceSettings.model_validate(changed.model_dump())
        self._engine.resize(StageLimits.of_settings(self._service.settings))

    def _line(self, episode: Job) -> JobLine:
        active, now = episode.id in self._engine.running, self._service.clock.monotonic()
        ledger, environment = episode.attempt.transcript.ledger, episode.attempt.environment
        sandbox = None if environment is None else environment.sandbox_id
        return JobLine(
            id=episode.id,
            group_id=episode.request.id,
            environment=episode.request.environment,
            task_id=episode.task.id,
            state=self._engine.scheduler.state(episode.id) or JobState.CANCELLED,
            active=active,
            attempts=episode.attempts,
            since_s=now - (episode.started_at if active else episode.waiting_since),
            turns=0 if ledger is None else ledger.turns,
            tokens=0 if ledger is None else len(ledger),
            node=episode.node,
            memory_bytes=self._memory().busy.get(sandbox) if sandbox else None,
        )
