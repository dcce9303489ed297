"""Batch manager: applies requests of callers and events of the service to the batches.

Plans receive results in the order of their cursors, when they are stored. Only the groups and results of a
batch are stored, not its progress. A restarted service reads them, and its plans decide the same again. One
asyncio task starts the groups that changed plans want, and cancels samples that are not needed. A plan
computes these actions from its current state, so they can be computed again at any time.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from prorl_envs.clock import Clock
from prorl_envs.config import ServiceSettings
from prorl_envs.errors import InputError
from prorl_envs.rollout.api.batches import BatchRequest, BatchTask, BatchTasks, BatchView, SelectedGroups
from prorl_envs.rollout.api.errors import Conflict, NotFound, QueueFull, Unavailable
from prorl_envs.rollout.api.types import Result, job_id, split_job_id
from prorl_envs.rollout.api.views import ResultPage
from prorl_envs.rollout.batches import record
from prorl_envs.rollout.batches.dynamic_sampling import BatchPlan, GroupDecision, PlannedGroup, SampleOutcome
from prorl_envs.rollout.batches.record import Batch, group_request
from prorl_envs.rollout.scheduling.fair_queue import COMMON, Share
from prorl_envs.rollout.service.groups import Groups
from prorl_envs.rollout.store.base import PAGE_TOKENS, NewGroup, StoredBatch, token_count
from prorl_envs.rollout.store.sql import SqlStore

log = logging.getLogger(__name__)

#: Maximum number of groups started by one write.
CHUNK = 64
#: Seconds before a failed start of groups is tried again if the store is unavailable.
PAUSE_S = 1.0


@dataclass(eq=False)
class Batches:
    """All stored batches.

    Args:
        groups: groups of the service. Their store has the batches too. The lock of their guard is held while
            batches change, so that submissions of callers happen before or after a change.
        settings: limits of batches.
        clock: measures waiting times.
    """

    groups: Groups
    settings: ServiceSettings
    clock: Clock
    store: SqlStore = field(init=False)
    #: Called with each decision on a group.
    on_decision: Callable[[GroupDecision], None] = field(default=lambda _: None, init=False)
    _batches: dict[str, Batch] = field(default_factory=dict, init=False)
    _owners: dict[str, Batch] = field(default_factory=dict, init=False)  # by group id
    _change: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _stopped: bool = field(default=False, init=False)
    _pending: dict[str, Batch] = field(default_factory=dict, init=False)  # they may have pending actions
    _blocked: dict[str, Batch] = field(default_factory=dict, init=False)  # they wait for room in the queue
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _worker: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.store = self.groups.store

    # Lifecycle.

    async def restore(self) -> None:
        """Load the batches from the store. A batch that cannot continue is cancelled."""
        for stored, groups in await self.store.batches():
            batch = self._add(stored)
            record.restore(batch.plan, stored, groups)
            self._owners |= dict.fromkeys(batch.plan.groups, batch)
        for batch in self._batches.values():
            source = self._batches.get(batch.request.carry_from or "")
            if source is not None:
                source.plan.pass_on(batch.stored.carried)
            for name in batch.stored.carried:
                started_by_batch, index = split_job_id(name)
                if started_by_batch in self._batches:
                    plan = self._batches[started_by_batch].plan
                    plan.started = max(plan.started, index + 1)
            if not batch.plan.state.over:
                self.groups.leases.grant("batches", batch.id, batch.request.lease_s)
                await self._check_rest(batch)

    def start(self) -> None:
        """Start the worker, and let it look at every batch."""
        self._worker = asyncio.create_task(self._work())
        self._worker.add_done_callback(_ended)
        for batch in self._batches.values():
            self._mark_pending(batch)

    async def aclose(self) -> None:
        """Stop starting groups. The groups in flight are not stopped here. Idempotent."""
        self._stopped = True
        self._announce()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])

    # Requests of callers.

    async def submit(self, request: BatchRequest, *, quota: tuple[str, int] | None = None) -> BatchView:
        """Accept a batch. A request that was accepted before has no further effect.

        Args:
            request: the batch request.
            quota: prefix of batch ids, and the maximum number of running batches with this prefix.

        Raises:
            InputError: the request exceeds a limit, or a task is wrong; nothing of it is stored.
            NotFound: the batch in `carry_from` does not exist.
            Conflict: the id is taken by another request, or the batch in `carry_from` has no groups to carry.
            QueueFull: too many batches are running.
            Unavailable: the service is not serving.
        """
        self._check_bounds(request)
        await self._check_tasks(request, request.tasks, 0)
        await asyncio.shield(asyncio.create_task(self._submit(request, quota)))
        return record.view(self._batch(request.id))

    async def extend(self, batch_id: str, body: BatchTasks) -> BatchView:
        """Append tasks to a batch's stream.

        Raises:
            InputError: a task is wrong, or there would be too many tasks.
            NotFound: no such batch.
            Conflict: the stream is closed, has other tasks at these indices, or would have a gap.
        """
        await self._check_tasks(self._batch(batch_id).request, body.tasks, body.first)
        await asyncio.shield(asyncio.create_task(self._extend(batch_id, body)))
        return record.view(self._batch(batch_id))

    async def cancel(self, batch_id: str) -> BatchView:
        """Cancel the groups in flight of a batch, also those that a finished batch has left for a later one.

        Raises:
            NotFound: no such batch.
        """
        await asyncio.shield(asyncio.create_task(self._cancel(batch_id)))
        return record.view(self._batch(batch_id))

    async def view(self, batch_id: str, *, wait_s: float = 0.0) -> BatchView:
        """Return the progress of a batch.

        Args:
            wait_s: maximum seconds to wait until the batch is finished or needs tasks.

        Raises:
            NotFound: no such batch.
        """
        batch = self._batch(batch_id)
        await self._until(lambda: batch.plan.state.over or batch.plan.waiting_for_tasks, wait_s)
        return record.view(batch)

    def views(self) -> list[BatchView]:
        """Return all stored batches, oldest first."""
        return [record.view(batch) for batch in self._batches.values()]

    def selected(self, batch_id: str) -> SelectedGroups:
        """Return the informative groups of a batch.

        Raises:
            NotFound: no such batch.
        """
        plan = self._batch(batch_id).plan
        return SelectedGroups(
            state=plan.state, groups=[record.selected(plan, name) for name in plan.selected]
        )

    async def results(self, batch_id: str, after: int, *, limit: int, wait_s: float = 0.0) -> ResultPage:
        """Return results of the informative groups, in the order in which the groups were decided.

        Args:
            after: number of results to skip. The caller confirms that it has read them.
            limit: maximum number of results.
            wait_s: maximum seconds to wait for the first result while the batch is running.

        Raises:
            NotFound: no such batch, or a result is no longer stored.
        """
        batch = self._batch(batch_id)
        plan = batch.plan
        self._confirmed(batch, after)
        await self._until(lambda: len(plan.chosen) > after or plan.state.over, wait_s)
        page: list[Result] = []
        tokens = 0
        for group_id, sample in plan.chosen[after : after + limit]:
            result = await self.store.result(job_id(group_id, sample))
            tokens += token_count(result)
            if page and tokens > PAGE_TOKENS:
                break
            page.append(result)
        if not page:  # the batch may have finished since the first call
            self._confirmed(batch, after)
        return ResultPage(results=page, next=after + len(page))

    def _confirmed(self, batch: Batch, count: int) -> None:
        """Mark the first `count` chosen results as read. If these are all of a finished batch, mark the
        results of its other groups too."""
        plan = batch.plan
        if count > len(plan.chosen):  # the reader cannot have received so many
            return
        chosen = plan.chosen[batch.read : count]
        self.store.acknowledge([plan.groups[group].ended[sample].cursor for group, sample in chosen])
        batch.read = max(batch.read, count)
        if plan.state.over and count == len(plan.chosen) and not batch.read_to_the_end:
            batch.read_to_the_end = True
            self._acknowledge_rest(batch)

    def _acknowledge_rest(self, batch: Batch) -> None:
        """If a batch was read to the end, mark all of its results as read, except results of groups that a
        later batch may take over."""
        if batch.read_to_the_end:
            carriable = {group.id for group in batch.plan.carriable}
            groups = (group for name, group in batch.plan.groups.items() if name not in carriable)
            self.store.acknowledge([ended.cursor for group in groups for ended in group.ended.values()])

    # Events of the service.

    def owns(self, group_id: str) -> bool:
        """Return True if the id belongs to a group of a known batch."""
        return split_job_id(group_id)[0] in self._batches

    def share(self, batch_id: str | None) -> Share:
        """Return the scheduling share of a batch's jobs; `COMMON` for an unknown batch or None."""
        batch = self._batches.get(batch_id or "")
        return batch.share if batch else COMMON

    def ended(self, result: Result) -> None:
        """Record that a result was stored. Must be called in the order of the cursors."""
        batch = self._owners.get(result.group_id)
        if batch is not None:
            kind = result.failure.kind.value if result.failure else ""
            outcome = SampleOutcome(result.cursor, result.reward, kind)
            if decision := batch.plan.ended(result.group_id, result.sample, outcome):
                self.on_decision(decision)
            if batch.read_to_the_end and result.group_id not in {group.id for group in batch.plan.carriable}:
                # A sample that the batch cancelled, or did not choose: no reader will receive its result.
                self.store.acknowledge([result.cursor])
            self._changed(batch)

    def freed(self) -> None:
        """Resume blocked batches, after the queue has room again or the service accepts work again."""
        if self._blocked:
            self._pending |= self._blocked
            self._blocked.clear()
            self._wake.set()

    # The task that carries out the pending actions.

    def _mark_pending(self, batch: Batch) -> None:
        self._pending[batch.id] = batch
        self._wake.set()

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            changed, self._pending = self._pending, {}
            for batch in sorted(changed.values(), key=lambda batch: -batch.request.priority):
                try:
                    await self._advance(batch)
                except Unavailable as error:
                    log.debug("batch %s: trying again in %g s: %s", batch.id, PAUSE_S, error)
                    await self.clock.sleep(PAUSE_S)
                    self._mark_pending(batch)

    async def _advance(self, batch: Batch) -> None:
        """Carry out the pending actions of a batch."""
        if jobs := _unneeded(batch.plan):
            await self.groups.engine.cancel(jobs)
        indices = batch.plan.to_start()
        try:
            self.groups.guard.check_open()
        except Unavailable:  # the batch is blocked until the service accepts work again
            self._blocked[batch.id] = batch
            return
        remaining = self.groups.remaining_for(batch.id) // batch.request.samples
        fitting = indices[: min(CHUNK, remaining)]
        if len(fitting) < len(indices):
            self._blocked[batch.id] = batch
        if not fitting:
            return
        try:
            await self._start_groups(batch, fitting)
        except QueueFull:  # another caller has filled the queue meanwhile
            self._blocked[batch.id] = batch
            if self.groups.remaining_for(batch.id) >= batch.request.samples:
                self.freed()  # the queue has room again already
        else:
            self._mark_pending(batch)

    async def _start_groups(self, batch: Batch, indices: range) -> None:
        request = batch.request
        requests = [group_request(request, batch.rows[index], index) for index in indices]
        tasks = [self.groups.environments.load(group) for group in requests]
        groups = [
            NewGroup(group, task.id, batch.id, request.weight_version)
            for group, task in zip(requests, tasks, strict=True)
        ]

        def on_stored() -> None:
            for index, group in zip(indices, requests, strict=True):
                batch.plan.begin(index, PlannedGroup(group.id, request.samples, request.weight_version))
                self._owners[group.id] = batch

        # If this task is cancelled here, a group that is stored must still be started.
        accepting = self.groups.accept(groups, tasks, share=batch.share, on_stored=on_stored)
        await asyncio.shield(asyncio.create_task(accepting))

    # Changes that hold the lock. Each runs in its own task, so that a disconnected caller does not cancel it.

    async def _submit(self, request: BatchRequest, quota: tuple[str, int] | None) -> None:
        async with self.groups.guard.lock:
            known = self._batches.get(request.id)
            if known is not None:
                if known.request != request:
                    raise Conflict(f"batch {request.id!r} is known with another request", hint="use a new id")
                return
            self.groups.guard.check_open()
            for prefix, limit in (("", self.settings.batches), *([quota] if quota else [])):
                if (running := self._running(prefix)) >= limit:
                    raise QueueFull(
                        f"{running} batches are running, which is the maximum", hint="try again later"
                    )
            source = self._source(request)
            stored = record.new(request, source)
            await self.store.open_batch(stored)
            self.groups.leases.grant("batches", request.id, request.lease_s)
            batch = self._add(stored)
            if source is not None:
                batch.plan.adopt(source.plan.pass_on(stored.carried))
                self._acknowledge_rest(source)
                self._owners |= dict.fromkeys(stored.carried, batch)
                self._changed(source)
            self._changed(batch)
            await self._drop_oldest()

    async def _extend(self, batch_id: str, body: BatchTasks) -> None:
        async with self.groups.guard.lock:
            batch = self._batch(batch_id)
            stored = batch.stored
            known = batch.rows[body.first : body.first + len(body.tasks)]
            if body.first > len(batch.rows) or body.tasks[: len(known)] != known:
                hint = f"the stream has {len(batch.rows)} tasks"
                raise Conflict(f"these are not the tasks from index {body.first} on", hint=hint)
            new = body.tasks[len(known) :]
            if stored.closed:
                if new:
                    raise Conflict(f"the task stream of batch {batch_id!r} has ended", hint="use a new batch")
                return
            if len(batch.rows) + len(new) > (limit := self.settings.batch_tasks):
                raise InputError(f"a batch has at most {limit} tasks", hint="see service.batch_tasks")
            closed = not body.stream_open
            await self.store.extend_batch(batch_id, len(batch.rows), new, closed=closed)
            batch.stored = replace(stored, appended=(*stored.appended, *new), closed=closed)
            batch.rows.extend(new)
            batch.plan.add_tasks(len(new), closed=closed)
            self._changed(batch)

    async def _cancel(self, batch_id: str) -> None:
        async with self.groups.guard.lock:
            batch = self._batch(batch_id)
            plan = batch.plan
            if batch.stored.cancelled_at is None and (plan.carriable or not plan.state.over):
                await self._cancel_plan(batch)
                self._acknowledge_rest(batch)
                self._changed(batch)
        await self.groups.engine.cancel(_unneeded(plan))

    async def _cancel_plan(self, batch: Batch) -> None:
        cancelled_at = await self.store.cancel_batch(batch.id)
        batch.stored = replace(batch.stored, cancelled_at=cancelled_at)
        batch.plan.cancel(cancelled_at)

    def _source(self, request: BatchRequest) -> Batch | None:
        if request.carry_from is None:
            return None
        source = self._batch(request.carry_from)
        if not source.plan.state.over:
            raise Conflict(f"batch {request.carry_from!r} is still running", hint="wait until it is finished")
        if source.request.on_complete != "carry":
            raise Conflict(
                f"batch {request.carry_from!r} leaves nothing", hint="submit it with on_complete: carry"
            )
        if source.plan.passed_on is not None:
            hint = "carry from the other batch"
            raise Conflict(f"another batch carried from {request.carry_from!r} already", hint=hint)
        return source

    def _add(self, stored: StoredBatch) -> Batch:
        request = stored.request
        batch = Batch(stored, BatchPlan(request), [*request.tasks, *stored.appended])
        batch.plan.add_tasks(len(batch.rows), closed=stored.closed)
        self._batches[request.id] = batch
        return batch

    async def _drop_oldest(self) -> None:
        """Drop the oldest batches in excess of `retention.max_batches`. Only idle batches count and are
        dropped, and only if their results are read."""
        idle = [batch for batch in self._batches.values() if batch.idle]
        excess = len(idle) - self.settings.retention.max_batches
        for batch in idle:
            if excess <= 0:
                break
            if await self._is_unread(batch):
                continue
            excess -= 1
            await self.store.drop_batch(batch.id)
            del self._batches[batch.id]
            for group in batch.plan.groups:
                self._owners.pop(group, None)

    async def _is_unread(self, batch: Batch) -> bool:
        """Return True if the store has a chosen result of the batch that no reader has acknowledged."""
        plan = batch.plan
        chosen = {plan.groups[group].ended[sample].cursor for group, sample in plan.chosen}
        if batch.read_to_the_end or not chosen:
            return False
        return not chosen.isdisjoint(await self.store.cursors(min(chosen) - 1, max(chosen), unread=True))

    # Helpers.

    def _running(self, prefix: str) -> int:
        """Return the number of running batches whose id starts with `prefix`."""
        return sum(
            name.startswith(prefix) and not batch.plan.state.over for name, batch in self._batches.items()
        )

    def _check_bounds(self, request: BatchRequest) -> None:
        settings = self.settings
        quota = self.groups.quota_of(request.id)
        bounds = {
            "groups": (request.groups, settings.batch_groups, "service.batch_groups"),
            "in_flight": (request.in_flight or 1, settings.batch_groups, "service.batch_groups"),
            "tasks": (len(request.tasks), settings.batch_tasks, "service.batch_tasks"),
            "samples": (request.samples, settings.queue, "service.queue"),
        }
        if quota is not None and quota[1] < settings.queue:
            bounds["samples"] = (request.samples, quota[1], "your quota of jobs")
        for name, (value, limit, setting) in bounds.items():
            if value > limit:
                raise InputError(f"{name} is at most {limit}, not {value}", hint=f"the limit is {setting}")

    async def _check_tasks(self, request: BatchRequest, tasks: Sequence[BatchTask], first: int) -> None:
        for index, row in enumerate(tasks, first):
            try:
                self.groups.environments.load(record.group_request(request, row, index))
            except InputError as error:
                raise InputError(f"task {index}: {error.message}", hint=error.hint) from error
            if index % 32 == 0:
                await asyncio.sleep(0)  # let other tasks of the event loop run

    async def _check_rest(self, batch: Batch) -> None:
        """Cancel a batch of an earlier service if this service cannot start its remaining tasks."""
        started = batch.plan.started
        try:
            await self._check_tasks(batch.request, batch.rows[started:], started)
        except InputError as error:
            log.error("batch %s of an earlier service cannot be resumed: %s", batch.id, error)
            await self._cancel_plan(batch)

    def _batch(self, batch_id: str) -> Batch:
        batch = self._batches.get(batch_id)
        if batch is None:
            raise NotFound(f"no batch {batch_id!r}")
        return batch

    async def _until(self, condition: Callable[[], bool], wait_s: float) -> None:
        try:
            async with self.clock.timeout(wait_s):
                while not condition() and not self._stopped:
                    await self._change.wait()
        except TimeoutError:
            pass  # the returned view shows the current state

    def _changed(self, batch: Batch) -> None:
        self._mark_pending(batch)
        self._announce()

    def _announce(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def _unneeded(plan: BatchPlan) -> list[str]:
    """Return the ids of the jobs to cancel."""
    return [job_id(group, sample) for group, sample in plan.unneeded()]


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the service has a bug: batches start no more groups", exc_info=error)
