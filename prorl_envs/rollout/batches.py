"""The service's batches: what callers ask of them, and what the service tells them.

Results reach the plans in the order of their cursors, as they are kept. Nothing about the progress of a
batch is written down but the groups it began and their results: a restarted service reads those, and its
plans decide the same again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from prorl_envs.clock import Clock
from prorl_envs.config import ServiceSettings
from prorl_envs.errors import InputError
from prorl_envs.rollout import batch_record
from prorl_envs.rollout.batch_plan import BatchPlan, Ended, Judgement
from prorl_envs.rollout.batch_record import Batch
from prorl_envs.rollout.batch_types import BatchRequest, BatchTask, BatchTasks, BatchView, SelectedGroups
from prorl_envs.rollout.batch_worker import BatchWorker, Host, unneeded
from prorl_envs.rollout.errors import Conflict, Full, NotFound
from prorl_envs.rollout.fair_queue import COMMON, Share
from prorl_envs.rollout.store import PAGE_TOKENS, Store, StoredBatch, token_count
from prorl_envs.rollout.types import Result, job_id, split_job_id
from prorl_envs.rollout.views import ResultPage

log = logging.getLogger(__name__)


class Batches:
    """All batches that are kept.

    Args:
        host: the service.
        store: keeps batches, groups and results.
        settings: bounds.
        clock: measures waits.
        lock: held while batches are changed, so that what callers submit comes before or after.
        decided: called with each judgement of a group.
    """

    def __init__(
        self,
        host: Host,
        store: Store,
        settings: ServiceSettings,
        clock: Clock,
        lock: asyncio.Lock,
        decided: Callable[[Judgement], None],
    ) -> None:
        self._decided = decided
        self._host = host
        self._store = store
        self._settings = settings
        self._clock = clock
        self._lock = lock
        self._batches: dict[str, Batch] = {}
        self._owners: dict[str, Batch] = {}  # of each group
        self._worker = BatchWorker(host, clock, self._owners.__setitem__)
        self._news = asyncio.Event()
        self._stopped = False

    # Life.

    async def restore(self) -> None:
        """Take up what the store knows. A batch that cannot go on is cancelled, and holds up nothing else."""
        for stored, groups in await self._store.batches():
            batch = self._add(stored)
            batch_record.restore(batch.plan, stored, groups)
            self._owners |= dict.fromkeys(batch.plan.groups, batch)
        for batch in self._batches.values():
            source = self._batches.get(batch.request.carry_from or "")
            if source is not None:
                source.plan.pass_on(batch.stored.carried)
            for name in batch.stored.carried:
                origin, index = split_job_id(name)
                if origin in self._batches:
                    plan = self._batches[origin].plan
                    plan.started = max(plan.started, index + 1)
            if not batch.plan.state.over:
                self._host.leases.grant("batches", batch.id, batch.request.lease_s)
                await self._check_rest(batch)

    def start(self) -> None:
        """Begin to work."""
        self._worker.start()
        for batch in self._batches.values():
            self._worker.look_at(batch)

    async def aclose(self) -> None:
        """Start no more groups; those under way are the service's to end. Idempotent."""
        self._stopped = True
        self._announce()
        await self._worker.aclose()

    # What callers ask for.

    async def submit(self, request: BatchRequest, *, most: tuple[str, int] | None = None) -> BatchView:
        """Accept a batch. The same request under the same id is the same submission.

        Args:
            request: what is asked for.
            most: how many batches may run whose id begins so.

        Raises:
            InputError: the request is over a bound, or a task is wrong; nothing of it is kept.
            NotFound, Conflict: there is no batch to carry from, or nothing to carry from it.
            Conflict: the id is taken.
            Full: too many batches are running.
            Unavailable: the service is not serving.
        """
        self._check_bounds(request)
        await self._check_tasks(request, request.tasks, 0)
        await asyncio.shield(asyncio.create_task(self._submit(request, most)))
        return batch_record.view(self._batch(request.id))

    async def extend(self, batch_id: str, body: BatchTasks) -> BatchView:
        """Append tasks to a batch's stream.

        Raises:
            InputError: a task is wrong, or there would be too many; NotFound: no such batch.
            Conflict: the stream has ended, or has other tasks, or none yet, at that index.
        """
        await self._check_tasks(self._batch(batch_id).request, body.tasks, body.first)
        await asyncio.shield(asyncio.create_task(self._extend(batch_id, body)))
        return batch_record.view(self._batch(batch_id))

    async def cancel(self, batch_id: str) -> BatchView:
        """End what is under way of a batch. Of one that is over, that is what it left over.

        Raises:
            NotFound.
        """
        await asyncio.shield(asyncio.create_task(self._cancel(batch_id)))
        return batch_record.view(self._batch(batch_id))

    async def view(self, batch_id: str, *, wait_s: float = 0.0) -> BatchView:
        """How far a batch is.

        Args:
            wait_s: seconds to wait until it is over, or waits for tasks.

        Raises:
            NotFound.
        """
        batch = self._batch(batch_id)
        await self._until(lambda: batch.plan.state.over or batch.plan.waiting_for_tasks, wait_s)
        return batch_record.view(batch)

    def views(self) -> list[BatchView]:
        """All batches that are kept, oldest first."""
        return [batch_record.view(batch) for batch in self._batches.values()]

    def selected(self, batch_id: str) -> SelectedGroups:
        """The informative groups.

        Raises:
            NotFound.
        """
        plan = self._batch(batch_id).plan
        return SelectedGroups(
            state=plan.state, groups=[batch_record.selected(plan, name) for name in plan.selected]
        )

    async def results(self, batch_id: str, after: int, *, limit: int, wait_s: float = 0.0) -> ResultPage:
        """Results of the informative groups, group by group in the order in which these were decided.

        Args:
            after: how many of them to leave out.
            limit: most results.
            wait_s: seconds to wait for the first, while the batch is running.

        Raises:
            NotFound: no such batch, or a result is no longer kept.
        """
        plan = self._batch(batch_id).plan
        await self._until(lambda: len(plan.chosen) > after or plan.state.over, wait_s)
        page: list[Result] = []
        tokens = 0
        for group_id, sample in plan.chosen[after : after + limit]:
            result = await self._store.result(job_id(group_id, sample))
            tokens += token_count(result)
            if page and tokens > PAGE_TOKENS:
                break
            page.append(result)
        return ResultPage(results=page, next=after + len(page))

    # What the service tells.

    def owns(self, group_id: str) -> bool:
        """Whether a group id is one that a batch gives."""
        return split_job_id(group_id)[0] in self._batches

    def share(self, batch_id: str | None) -> Share:
        """The share of a batch's jobs."""
        batch = self._batches.get(batch_id or "")
        return batch.share if batch else COMMON

    def ended(self, result: Result) -> None:
        """A result was kept. To be called in the order of the cursors."""
        batch = self._owners.get(result.group_id)
        if batch is not None:
            kind = result.failure.kind.value if result.failure else ""
            outcome = Ended(result.cursor, result.reward, kind)
            if judgement := batch.plan.ended(result.group_id, result.sample, outcome):
                self._decided(judgement)
            self._changed(batch)

    def freed(self) -> None:
        """There is more room in the queue."""
        self._worker.freed()

    # Changes, each in a task of its own that nobody cancels, under the lock.

    async def _submit(self, request: BatchRequest, most: tuple[str, int] | None) -> None:
        async with self._lock:
            known = self._batches.get(request.id)
            if known is not None:
                if known.request != request:
                    raise Conflict(f"batch {request.id!r} is known with another request", hint="use a new id")
                return
            self._host.check_open()
            for prefix, bound in (("", self._settings.batches), *([most] if most else [])):
                if (running := self._running(prefix)) >= bound:
                    raise Full(f"{running} batches are running", hint="try again when one is over")
            source = self._source(request)
            stored = batch_record.new(request, source)
            await self._store.open_batch(stored)
            self._host.leases.grant("batches", request.id, request.lease_s)
            batch = self._add(stored)
            if source is not None:
                batch.plan.adopt(source.plan.pass_on(stored.carried))
                self._owners |= dict.fromkeys(stored.carried, batch)
                self._changed(source)
            self._changed(batch)
            await self._drop_oldest()

    async def _extend(self, batch_id: str, body: BatchTasks) -> None:
        async with self._lock:
            batch = self._batch(batch_id)
            stored = batch.stored
            there = batch.rows[body.first : body.first + len(body.tasks)]
            if body.first > len(batch.rows) or body.tasks[: len(there)] != there:
                hint = f"the stream has {len(batch.rows)} tasks"
                raise Conflict(f"these are not the tasks from index {body.first} on", hint=hint)
            new = body.tasks[len(there) :]
            if stored.closed:
                if new:
                    raise Conflict(f"the task stream of batch {batch_id!r} has ended", hint="use a new batch")
                return
            if len(batch.rows) + len(new) > self._settings.batch_tasks:
                most = self._settings.batch_tasks
                raise InputError(f"a batch has at most {most} tasks", hint="service.batch_tasks")
            closed = not body.more
            await self._store.extend_batch(batch_id, len(batch.rows), new, closed=closed)
            batch.stored = replace(stored, appended=(*stored.appended, *new), closed=closed)
            batch.rows.extend(new)
            batch.plan.add_tasks(len(new), closed=closed)
            self._changed(batch)

    async def _cancel(self, batch_id: str) -> None:
        async with self._lock:
            batch = self._batch(batch_id)
            plan = batch.plan
            if batch.stored.cancelled_at is None and (plan.leftover or not plan.state.over):
                await self._end(batch)
                self._changed(batch)
        await self._host.cancel_jobs(unneeded(plan))

    async def _end(self, batch: Batch) -> None:
        at = await self._store.cancel_batch(batch.id)
        batch.stored = replace(batch.stored, cancelled_at=at)
        batch.plan.cancel(at)

    def _source(self, request: BatchRequest) -> Batch | None:
        if request.carry_from is None:
            return None
        source = self._batch(request.carry_from)
        if not source.plan.state.over:
            raise Conflict(f"batch {request.carry_from!r} is running", hint="carry from it when it is over")
        if source.request.leftover != "carry":
            raise Conflict(
                f"batch {request.carry_from!r} leaves nothing", hint="submit it with leftover: carry"
            )
        if source.plan.passed_on is not None:
            raise Conflict(f"another batch carried from {request.carry_from!r} already", hint="name that one")
        return source

    def _add(self, stored: StoredBatch) -> Batch:
        request = stored.request
        batch = Batch(stored, BatchPlan(batch_record.rules_of(request)), [*request.tasks, *stored.appended])
        batch.plan.add_tasks(len(batch.rows), closed=stored.closed)
        self._batches[request.id] = batch
        return batch

    async def _drop_oldest(self) -> None:
        """Forget the oldest batches over the bound, of those that are over in every respect."""
        over = [name for name, batch in self._batches.items() if batch.idle]
        for name in over[: max(0, len(over) - self._settings.keep_batches)]:
            await self._store.drop_batch(name)
            for group in self._batches.pop(name).plan.groups:
                self._owners.pop(group, None)

    # Steps.

    def _running(self, prefix: str) -> int:
        """How many are running whose id begins so."""
        return sum(
            name.startswith(prefix) and not batch.plan.state.over for name, batch in self._batches.items()
        )

    def _check_bounds(self, request: BatchRequest) -> None:
        settings = self._settings
        quota = self._host.room.quota_of(request.id)
        bounds = {
            "groups": (request.groups, settings.batch_groups, "service.batch_groups"),
            "in_flight": (request.in_flight or 1, settings.batch_groups, "service.batch_groups"),
            "tasks": (len(request.tasks), settings.batch_tasks, "service.batch_tasks"),
            "samples": (request.samples, settings.queue, "service.queue"),
        }
        if quota is not None and quota[1] < settings.queue:
            bounds["samples"] = (request.samples, quota[1], "your quota of jobs")
        for name, (asked, most, setting) in bounds.items():
            if asked > most:
                raise InputError(f"{name} is at most {most}, not {asked}", hint=f"the bound is {setting}")

    async def _check_tasks(self, request: BatchRequest, tasks: Sequence[BatchTask], first: int) -> None:
        for index, row in enumerate(tasks, first):
            try:
                self._host.offer.load(batch_record.group_request(request, row, index))
            except InputError as error:
                raise InputError(f"task {index}: {error.message}", hint=error.hint) from error
            if index % 32 == 0:
                await asyncio.sleep(0)  # others have the loop in between

    async def _check_rest(self, batch: Batch) -> None:
        """Cancel a batch of an earlier service that has tasks left which this one cannot begin."""
        begun = batch.plan.started
        try:
            await self._check_tasks(batch.request, batch.rows[begun:], begun)
        except InputError as error:
            log.error("batch %s of an earlier service cannot go on: %s", batch.id, error)
            await self._end(batch)

    def _batch(self, batch_id: str) -> Batch:
        batch = self._batches.get(batch_id)
        if batch is None:
            raise NotFound(f"no batch {batch_id!r}")
        return batch

    async def _until(self, condition: Callable[[], bool], wait_s: float) -> None:
        try:
            async with self._clock.timeout(wait_s):
                while not condition() and not self._stopped:
                    await self._news.wait()
        except TimeoutError:
            pass  # what there is says so

    def _changed(self, batch: Batch) -> None:
        self._worker.look_at(batch)
        self._announce()

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
