"""Does what the plans of batches decide: starts groups, and cancels samples that nobody needs.

One task asks each plan that has news what is to be done now. Who is asked twice, or after a restart, gives
what is still to be done.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from prorl_envs.clock import Clock
from prorl_envs.env.base import Task
from prorl_envs.rollout.batch_plan import BatchPlan, Group
from prorl_envs.rollout.batch_record import Batch, group_request
from prorl_envs.rollout.errors import Full, Unavailable
from prorl_envs.rollout.fair_queue import Share
from prorl_envs.rollout.leases import Leases
from prorl_envs.rollout.offer import Offer
from prorl_envs.rollout.room import Room
from prorl_envs.rollout.store import NewGroup
from prorl_envs.rollout.types import job_id

log = logging.getLogger(__name__)

#: Groups started by one write.
CHUNK = 64
#: Seconds between two tries to start groups while the store is unavailable.
PAUSE_S = 1.0


class Host(Protocol):
    """What batches need of the service."""

    leases: Leases
    offer: Offer
    room: Room

    def check_open(self) -> None:
        """Raises: Unavailable."""
        ...

    async def accept(
        self, groups: Sequence[NewGroup], tasks: Sequence[Task], *, share: Share, kept: Callable[[], None]
    ) -> object:
        """Keep groups, call `kept`, and have their jobs done.

        Raises:
            Full, Unavailable: and nothing was kept.
        """
        ...

    async def cancel_jobs(self, jobs: Iterable[str]) -> None:
        """End jobs, and return once their results are kept."""
        ...


class BatchWorker:
    """Works on batches that have news.

    Args:
        host: the service.
        clock: waits between tries.
        begun: called with each group that was started, and its batch.
    """

    def __init__(self, host: Host, clock: Clock, begun: Callable[[str, Batch], None]) -> None:
        self._host = host
        self._clock = clock
        self._begun = begun
        self._news: dict[str, Batch] = {}  # batches with something to be done, perhaps
        self._blocked: dict[str, Batch] = {}  # batches that wait for room
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to work."""
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(_ended)

    async def aclose(self) -> None:
        """Start no more groups. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def look_at(self, batch: Batch) -> None:
        """There may be something to be done for a batch."""
        self._news[batch.id] = batch
        self._wake.set()

    def freed(self) -> None:
        """There is more room in the queue, or the service takes work again."""
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
        """Do what is to be done now."""
        if jobs := unneeded(batch.plan):
            await self._host.cancel_jobs(jobs)
        indices = batch.plan.to_start()
        try:
            self._host.check_open()
        except Unavailable:  # until it goes on
            self._blocked[batch.id] = batch
            return
        fitting = indices[: min(CHUNK, self._host.room.left_for(batch.id) // batch.request.samples)]
        if len(fitting) < len(indices):
            self._blocked[batch.id] = batch
        if not fitting:
            return
        try:
            await self._start(batch, fitting)
        except Full:  # somebody else took the room meanwhile
            self._blocked[batch.id] = batch
            if self._host.room.left_for(batch.id) >= batch.request.samples:  # and has given it back
                self.freed()
        else:
            self.look_at(batch)

    async def _start(self, batch: Batch, indices: range) -> None:
        request = batch.request
        requests = [group_request(request, batch.rows[index], index) for index in indices]
        tasks = [self._host.offer.load(group) for group in requests]
        groups = [
            NewGroup(group, task.id, batch.id, request.weight_version)
            for group, task in zip(requests, tasks, strict=True)
        ]

        def kept() -> None:
            for index, group in zip(indices, requests, strict=True):
                batch.plan.begin(index, Group(group.id, request.samples, request.weight_version))
                self._begun(group.id, batch)

        # Who stops this task must not leave a group that is stored and never begun.
        accepting = self._host.accept(groups, tasks, share=batch.share, kept=kept)
        await asyncio.shield(asyncio.create_task(accepting))


def unneeded(plan: BatchPlan) -> list[str]:
    """Ids of jobs to cancel."""
    return [job_id(group, sample) for group, sample in plan.unneeded()]


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the service met a bug: batches start no more groups", exc_info=error)
