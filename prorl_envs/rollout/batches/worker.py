"""Batch worker: starts the groups that batch plans ask for, and cancels samples that are not needed.

One task asks each changed plan for its pending actions. A plan always answers with the actions that are still
due, so asking again, or after a restart, is safe.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from prorl_envs.clock import Clock
from prorl_envs.env.base import Task
from prorl_envs.rollout.api.errors import QueueFull, Unavailable
from prorl_envs.rollout.api.types import job_id
from prorl_envs.rollout.batches.leases import Leases
from prorl_envs.rollout.batches.plan import BatchPlan, PlannedGroup
from prorl_envs.rollout.batches.record import Batch, group_request
from prorl_envs.rollout.episode.environments import EnvironmentRegistry
from prorl_envs.rollout.scheduling.fair_queue import Share
from prorl_envs.rollout.store.base import NewGroup

log = logging.getLogger(__name__)

#: Maximum number of groups started by one write.
CHUNK = 64
#: Seconds between two tries to start groups while the store is unavailable.
PAUSE_S = 1.0


class Capacity(Protocol):
    """Remaining room for jobs, and quotas."""

    def remaining_for(self, name: str) -> int:
        """Return the number of jobs that the tenant of this id may still submit."""
        ...

    def quota_of(self, name: str) -> tuple[str, int] | None:
        """Return the prefix of the tenant's ids and its quota of unfinished jobs; None if it has no quota."""
        ...


class BatchGroups(Protocol):
    """The groups of the service, as batches use them."""

    leases: Leases
    environments: EnvironmentRegistry

    @property
    def admission(self) -> Capacity: ...

    def check_open(self) -> None:
        """Check that the service accepts work.

        Raises:
            Unavailable: it does not.
        """
        ...

    async def accept(
        self, groups: Sequence[NewGroup], tasks: Sequence[Task], *, share: Share, kept: Callable[[], None]
    ) -> object:
        """Store groups, call `kept`, and start their jobs.

        Raises:
            QueueFull, Unavailable: nothing was stored.
        """
        ...

    async def cancel_jobs(self, jobs: Iterable[str]) -> None:
        """Cancel jobs, and return once their results are stored."""
        ...


class BatchWorker:
    """Works on batches that have changed.

    Args:
        groups: of the service.
        clock: waits between tries.
        on_start: called with each group that was started, and its batch.
    """

    def __init__(self, groups: BatchGroups, clock: Clock, on_start: Callable[[str, Batch], None]) -> None:
        self._groups = groups
        self._clock = clock
        self._on_start = on_start
        self._news: dict[str, Batch] = {}  # batches that may have pending actions
        self._blocked: dict[str, Batch] = {}  # batches that wait for room in the queue
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to work."""
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(_ended)

    async def aclose(self) -> None:
        """Start no more groups. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def look_at(self, batch: Batch) -> None:
        """Mark a batch as changed: it may have pending actions."""
        self._news[batch.id] = batch
        self._wake.set()

    def freed(self) -> None:
        """Resume blocked batches: the queue has room again, or the service accepts work again."""
        if self._blocked:
            self._news |= self._blocked
            self._blocked.clear()
            self._wake.set()

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            news, self._news = self._news, {}
            for batch in sorted(news.values(), key=lambda batch: -batch.request.priority):
                try:
                    await self._advance(batch)
                except Unavailable as error:
                    log.error("batch %s: trying again in %g s: %s", batch.id, PAUSE_S, error)
                    await self._clock.sleep(PAUSE_S)
                    self.look_at(batch)

    async def _advance(self, batch: Batch) -> None:
        """Carry out the pending actions of a batch."""
        if jobs := unneeded(batch.plan):
            await self._groups.cancel_jobs(jobs)
        indices = batch.plan.to_start()
        try:
            self._groups.check_open()
        except Unavailable:  # until the service accepts work again
            self._blocked[batch.id] = batch
            return
        fitting = indices[
            : min(CHUNK, self._groups.admission.remaining_for(batch.id) // batch.request.samples)
        ]
        if len(fitting) < len(indices):
            self._blocked[batch.id] = batch
        if not fitting:
            return
        try:
            await self._start(batch, fitting)
        except QueueFull:  # another caller took the room meanwhile
            self._blocked[batch.id] = batch
            if self._groups.admission.remaining_for(batch.id) >= batch.request.samples:  # and has released it
                self.freed()
        else:
            self.look_at(batch)

    async def _start(self, batch: Batch, indices: range) -> None:
        request = batch.request
        requests = [group_request(request, batch.rows[index], index) for index in indices]
        tasks = [self._groups.environments.load(group) for group in requests]
        groups = [
            NewGroup(group, task.id, batch.id, request.weight_version)
            for group, task in zip(requests, tasks, strict=True)
        ]

        def kept() -> None:
            for index, group in zip(indices, requests, strict=True):
                batch.plan.begin(index, PlannedGroup(group.id, request.samples, request.weight_version))
                self._on_start(group.id, batch)

        # Cancelling this task must not leave a group that is stored and never started.
        accepting = self._groups.accept(groups, tasks, share=batch.share, on_stored=kept)
        await asyncio.shield(asyncio.create_task(accepting))


def unneeded(plan: BatchPlan) -> list[str]:
    """Return the ids of the jobs to cancel."""
    return [job_id(group, sample) for group, sample in plan.unneeded()]


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the service met a bug: batches start no more groups", exc_info=error)
