"""Batch worker: starts the groups that batch plans want, and cancels samples that are not needed.

One asyncio task carries out the pending actions of each changed plan. A plan computes them from its current
state, so they can be computed again at any time, also after a restart.
"""

import asyncio
import logging
from collections.abc import Callable

from prorl_envs.clock import Clock
from prorl_envs.rollout.api.errors import QueueFull, Unavailable
from prorl_envs.rollout.api.types import job_id
from prorl_envs.rollout.batches.dynamic_sampling import BatchPlan, PlannedGroup
from prorl_envs.rollout.batches.record import Batch, group_request
from prorl_envs.rollout.service.groups import Groups
from prorl_envs.rollout.store.base import NewGroup

log = logging.getLogger(__name__)

#: Maximum number of groups started by one write.
CHUNK = 64
#: Seconds before a failed start of groups is tried again if the store is unavailable.
PAUSE_S = 1.0


class BatchWorker:
    """Worker that carries out the pending actions of changed batches.

    Args:
        groups: groups of the service.
        clock: measures the wait before another try.
        on_start: called with the id of each started group, and its batch.
    """

    def __init__(self, groups: Groups, clock: Clock, on_start: Callable[[str, Batch], None]) -> None:
        self._groups = groups
        self._clock = clock
        self._on_start = on_start
        self._changed: dict[str, Batch] = {}  # batches that may have pending actions
        self._blocked: dict[str, Batch] = {}  # batches that wait for room in the queue
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the worker's task."""
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(_ended)

    async def aclose(self) -> None:
        """Stop the worker's task. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def mark_changed(self, batch: Batch) -> None:
        """Mark a batch as changed: it may have pending actions."""
        self._changed[batch.id] = batch
        self._wake.set()

    def freed(self) -> None:
        """Resume blocked batches, after the queue has room again or the service accepts work again."""
        if self._blocked:
            self._changed |= self._blocked
            self._blocked.clear()
            self._wake.set()

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            changed, self._changed = self._changed, {}
            for batch in sorted(changed.values(), key=lambda batch: -batch.request.priority):
                try:
                    await self._advance(batch)
                except Unavailable as error:
                    log.debug("batch %s: trying again in %g s: %s", batch.id, PAUSE_S, error)
                    await self._clock.sleep(PAUSE_S)
                    self.mark_changed(batch)

    async def _advance(self, batch: Batch) -> None:
        """Carry out the pending actions of a batch."""
        if jobs := unneeded(batch.plan):
            await self._groups.cancel_jobs(jobs)
        indices = batch.plan.to_start()
        try:
            self._groups.guard.check_open()
        except Unavailable:  # the batch is blocked until the service accepts work again
            self._blocked[batch.id] = batch
            return
        remaining = self._groups.admission.remaining_for(batch.id) // batch.request.samples
        fitting = indices[: min(CHUNK, remaining)]
        if len(fitting) < len(indices):
            self._blocked[batch.id] = batch
        if not fitting:
            return
        try:
            await self._start(batch, fitting)
        except QueueFull:  # another caller has filled the queue meanwhile
            self._blocked[batch.id] = batch
            if self._groups.admission.remaining_for(batch.id) >= batch.request.samples:
                self.freed()  # the queue has room again already
        else:
            self.mark_changed(batch)

    async def _start(self, batch: Batch, indices: range) -> None:
        request = batch.request
        requests = [group_request(request, batch.rows[index], index) for index in indices]
        tasks = [self._groups.environments.load(group) for group in requests]
        groups = [
            NewGroup(group, task.id, batch.id, request.weight_version)
            for group, task in zip(requests, tasks, strict=True)
        ]

        def on_stored() -> None:
            for index, group in zip(indices, requests, strict=True):
                batch.plan.begin(index, PlannedGroup(group.id, request.samples, request.weight_version))
                self._on_start(group.id, batch)

        # If this task is cancelled here, a group that is stored must still be started.
        accepting = self._groups.accept(groups, tasks, share=batch.share, on_stored=on_stored)
        await asyncio.shield(asyncio.create_task(accepting))


def unneeded(plan: BatchPlan) -> list[str]:
    """Return the ids of the jobs to cancel."""
    return [job_id(group, sample) for group, sample in plan.unneeded()]


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the service has a bug: batches start no more groups", exc_info=error)
