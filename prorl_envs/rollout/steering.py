"""What operators see of unfinished jobs, and what they change while a service runs."""

import heapq
import logging
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

from prorl_envs.config import ServiceSettings
from prorl_envs.env.node import MemoryUse, NodeUse
from prorl_envs.errors import InputError
from prorl_envs.rollout.engine import Engine
from prorl_envs.rollout.episode import Episode
from prorl_envs.rollout.errors import Conflict, NotFound
from prorl_envs.rollout.placement import Limits
from prorl_envs.rollout.types import GroupRequest, JobState, Result, split_job_id
from prorl_envs.rollout.views import GroupView
from prorl_envs.rollout.watch import Now
from prorl_envs.rollout.watch_views import JobLine, JobPage, LimitsRequest

if TYPE_CHECKING:
    from prorl_envs.rollout.service import RolloutService

log = logging.getLogger(__name__)

#: Running jobs that a dashboard shows without being asked.
SHOWN = 50


class Steering:
    """See the module.

    Args:
        service: whose jobs they are.
        engine: carries them out.
        use: of the service's own machine, now; `memory`: of its sandboxes, of late.
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

    def now(self) -> Now:
        """The service at this moment."""
        service = self._service
        running = (self._engine.episodes[job] for job in self._engine.running)
        longest = heapq.nsmallest(SHOWN, running, key=lambda episode: episode.started_at)
        return Now(
            status=service.status(),
            attempts_limit=self._engine.scheduler.attempts,
            use=self._use(),
            memory=self._memory(),
            batches=service.batches.views(),
            nodes=service.fleet.views() if service.fleet is not None else [],
            running=[self._line(episode) for episode in longest],
        )

    def jobs(self, *, prefix: str = "", states: Collection[JobState] = (), limit: int = 100) -> JobPage:
        """Unfinished jobs.

        Args:
            prefix: how their ids begin.
            states: only of these; any where none is named.
            limit: most of them.
        """
        episodes, scheduler = self._engine.episodes, self._engine.scheduler

        def wanted() -> Iterator[Episode]:
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
        """How far a job is that has no result yet, in a result's form. Never kept, and no reward.

        Raises:
            NotFound: it is not known, or has a result.
        """
        episode, state = self._engine.episodes.get(job), self._engine.scheduler.state(job)
        if episode is None or state is None:
            raise NotFound(f"no job {job!r} is under way", hint="a finished one has a result")
        return episode.result(state)

    async def retry(self, job: str, *, quota: tuple[str, int] | None = None) -> GroupView:
        """Do a finished job again, as a group of its own: the result that there is stays. Asked twice, it is
        done once.

        Args:
            job: whose task, limits and sampling are taken.
            quota: as of `RolloutService.submit`.

        Raises:
            NotFound: there is no such job.
            Conflict: it is not finished.
            Full, Unavailable: as for a submission.
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
        except ValueError as error:  # which the id of a retry of a retry of a retry becomes
            raise InputError(f"job {job!r} cannot be retried under an id of its own") from error
        return (await self._service.submit([request], quota=quota))[0]

    def resize(self, asked: LimitsRequest) -> None:
        """Let more or less happen at once from here on, until the service ends. What is there over a bound
        goes on to its end."""
        named = asked.model_dump(exclude_none=True)
        changed = self._service.settings.model_copy(update=named)
        log.warning("limits: %s", ", ".join(f"{name} {value}" for name, value in named.items()))
        self._service.settings = ServiceSettings.model_validate(changed.model_dump())
        self._engine.resize(Limits.of_settings(self._service.settings))

    def _line(self, episode: Episode) -> JobLine:
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
