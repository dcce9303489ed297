"""Store of groups and results: the interface, and the store in memory.

The store keeps the requests, the number of attempts of each job, and the results. The state in between
belongs to the service, so a job costs three writes, independent of its turns.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Protocol

from prorl_envs.errors import FailureKind
from prorl_envs.rollout.api.batches import BatchRequest, BatchTask
from prorl_envs.rollout.api.errors import Conflict, CursorExpired, NotFound
from prorl_envs.rollout.api.types import ALL, GroupRequest, JobState, Result, Selection, split_job_id
from prorl_envs.rollout.store.summaries import SearchHits, body_of, look_through, summarise
from prorl_envs.viewer.summary import Summary

#: Most tokens of one page of results: a token is some 25 bytes of JSON.
PAGE_TOKENS = 500_000
#: Dropped results that are known by their group, environment and state.
KNOWN_DROPPED = 100_000
#: Bounds of the newest results that are also kept in memory: some 20 MB at most.
RECENT_RESULTS, RECENT_TOKENS = 256, 200_000


@dataclass(frozen=True, slots=True)
class StoredOutcome:
    """Outcome of a finished job; kept as long as its group."""

    state: JobState
    reward: float | None
    failure: FailureKind | None
    attempts: int
    cursor: int


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Group with the outcomes of its jobs.

    Args:
        request: as it was submitted.
        task_id: id of its task.
        outcomes: one per sample, None if the sample is not finished.
        attempts: number of attempts of each sample.
        failures: number of these attempts that had failed when the last one started.
        batch_id: the batch that the group counts for, or None.
        weight_version: named by the batch that started it.
    """

    request: GroupRequest
    task_id: str
    outcomes: tuple[StoredOutcome | None, ...]
    attempts: tuple[int, ...]
    failures: tuple[int, ...]
    batch_id: str | None = None
    weight_version: int | None = None

    @property
    def started_by_batch(self) -> str | None:
        """Batch that started the group; may differ from the batch that the group counts for."""
        return split_job_id(self.request.id)[0] if self.batch_id else None

    @property
    def complete(self) -> bool:
        return None not in self.outcomes


@dataclass(frozen=True, slots=True)
class NewGroup:
    """New group, with the id of its validated task and the batch that starts it."""

    request: GroupRequest
    task_id: str
    batch_id: str | None = None
    weight_version: int | None = None


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Batch as it was submitted, with later additions. Its progress follows from its groups.

    Args:
        request: with the first tasks.
        tenant: tenant of its place in the queue.
        carried: ids of groups taken over from `request.carry_from`; `dropped`: number of groups too old.
        appended: further tasks.
        closed: no more tasks will follow.
        cancelled_at: cursor of the newest result when it was cancelled, or None.
    """

    request: BatchRequest
    tenant: str
    carried: tuple[str, ...] = ()
    dropped: int = 0
    appended: tuple[BatchTask, ...] = ()
    closed: bool = True
    cancelled_at: int | None = None


@dataclass(frozen=True, slots=True)
class UnreadResults:
    """Stored results that no reader has acknowledged.

    Args:
        results: their number; `tokens`: tokens of their trajectories.
        dropped: unread results that the store has dropped; always 0 in a durable store.
    """

    results: int = 0
    tokens: int = 0
    dropped: int = 0


class Store(Protocol):
    """Store of groups by id and results by cursor. Calls may come from many tasks at once.

    A store on a disk raises `Unavailable` from any method if the disk fails.
    """

    @property
    def durable(self) -> bool:
        """True if the data outlives the process."""
        ...

    async def submit(self, groups: Sequence[NewGroup]) -> list[bool]:
        """Store new groups, all or none of them.

        Returns:
            For each group, True if it is new; False if the same request is stored already.

        Raises:
            Conflict: an id is stored with another request, or occurs in `groups` with different requests.
        """
        ...

    async def group(self, group_id: str) -> StoredGroup:
        """Return a group. Raises: NotFound."""
        ...

    async def started(self, job_id: str, failures: int = 0, *, at_once: bool = True) -> None:
        """Count an attempt at a job.

        Args:
            failures: earlier attempts that failed; the others were interrupted.
            at_once: return once it is stored. Otherwise it is stored soon, with the next write; a service
                that is killed before that has not counted the attempt.

        Raises:
            NotFound: no such job.
        """
        ...

    async def record(self, result: Result) -> Result:
        """Store the result of a job and assign its cursor. Only the first result of a job is stored; further
        calls return the first. Concurrent calls return in the order of the cursors.

        Raises:
            NotFound: its group is not known.
        """
        ...

    async def newest(self) -> int:
        """Return the greatest cursor; 0 if there is no result."""
        ...

    async def results(
        self, after: int, limit: int, *, max_tokens: int = PAGE_TOKENS, only: Selection = ALL
    ) -> list[Result]:
        """Return at most `limit` results with a cursor greater than `after`, in order. 0 starts with the
        oldest.

        Args:
            max_tokens: tokens of all their trajectories; the first result is returned regardless of its size.
            only: filter for results.

        Raises:
            CursorExpired: results after `after` that the filter accepts are no longer kept.
        """
        ...

    def acknowledge(self, cursors: Collection[int]) -> None:
        """Mark results as read, so that they may be dropped. A durable store drops no others.

        Stored soon, with the next write: after a kill before that, the results are unread. Cursors without a
        stored result are ignored.
        """
        ...

    @property
    def unread(self) -> UnreadResults:
        """Number of unread results."""
        ...

    async def cursors(self, after: int, up_to: int, only: Selection = ALL) -> list[int]:
        """Return the cursors of the stored results after `after`, up to and including `up_to`."""
        ...

    async def summaries(self, after: int, limit: int, *, only: Selection = ALL) -> list[Summary]:
        """Return summaries of the same results; never raises CursorExpired."""
        ...

    async def search(self, text: str, after: int, limit: int, *, only: Selection = ALL) -> SearchHits:
        """Run one step of a text search, over at most `limit` results with a cursor greater than `after`. The
        text must occur in a string of the result."""
        ...

    async def result(self, job_id: str) -> Result:
        """Return a result. Raises: NotFound: no such job, not finished, or its result is no longer kept."""
        ...

    async def unfinished(self) -> list[StoredGroup]:
        """Return the incomplete groups, oldest first, for a restarted service to resume."""
        ...

    async def open_batch(self, batch: StoredBatch) -> None:
        """Store a new batch, under an unused id, and assign its carried groups to it.

        Raises:
            Conflict: a group has an id that a group of the batch would have.
        """
        ...

    async def extend_batch(
        self, batch_id: str, first: int, tasks: Sequence[BatchTask], *, closed: bool
    ) -> None:
        """Append tasks to a batch's stream, the first of them at the index `first`."""
        ...

    async def cancel_batch(self, batch_id: str) -> int:
        """Mark a batch as cancelled. Returns the cursor of the newest result at that time."""
        ...

    async def drop_batch(self, batch_id: str) -> None:
        """Delete a batch. Its groups are then kept as long as their results, as groups without a batch."""
        ...

    async def batches(self) -> list[tuple[StoredBatch, list[StoredGroup]]]:
        """Return every batch with its groups, oldest first. A batch's groups are kept as long as the batch,
        even if their results are not."""
        ...

    async def keep(self, name: str, value: str) -> None:
        """Store a value under a name, replacing the previous one: state that a restarted service needs."""
        ...

    async def kept(self, name: str) -> str | None:
        """Return the value under a name, or None."""
        ...

    async def aclose(self) -> None: ...


@dataclass(slots=True)
class _Entry:
    group: NewGroup
    outcomes: list[StoredOutcome | None]
    attempts: list[int]
    failures: list[int]
    batch_id: str | None
    kept: int = 0  # number of stored results of this group

    @property
    def complete(self) -> bool:
        return None not in self.outcomes


class _Dropped(NamedTuple):
    """Dropped result, for readers that ask for it."""

    cursor: int
    group_id: str
    environment: str
    state: JobState


class MemoryStore:
    """Store in memory, which lasts as long as the process.

    Args:
        max_results: results kept, read or unread; the oldest are dropped first, and a complete group with its
            last result.
        max_tokens: tokens of all trajectories kept.
        ttl_s: seconds that results are kept; None is no bound. Older ones are dropped at the next result.
        now: monotonic seconds.
    """

    durable = False

    def __init__(
        self,
        *,
        max_results: int = 100_000,
        max_tokens: int = 50_000_000,
        ttl_s: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_results = max_results
        self._max_tokens = max_tokens
        self._ttl_s = ttl_s
        self._now = now
        self._recorded_at: deque[float] = deque()  # of each result kept
        self._entries: dict[str, _Entry] = {}
        self._results: OrderedDict[int, Result] = OrderedDict()
        self._tokens = 0
        self._cursor = 0
        self._dropped = 0  # cursor of the newest dropped result
        self._lost: deque[_Dropped] = deque()  # the newest dropped results
        self._forgotten = 0  # cursor of the newest dropped result that is not among them
        self._unread: dict[int, int] = {}  # tokens, by cursor
        self._unread_tokens = self._unread_dropped = 0
        self._batches: dict[str, StoredBatch] = {}
        self._values: dict[str, str] = {}

    async def submit(self, groups: Sequence[NewGroup]) -> list[bool]:
        new: dict[str, NewGroup] = {}
        fresh = []
        for group in groups:
            entry = self._entries.get(group.request.id)
            known = entry.group if entry else new.get(group.request.id)
            if known is not None and known.request != group.request:
                raise conflict(group.request.id)
            fresh.append(known is None)
            new.setdefault(group.request.id, group)
        for group_id, group in new.items():
            if group_id not in self._entries:
                samples = group.request.samples
                self._entries[group_id] = _Entry(
                    group, [None] * samples, [0] * samples, [0] * samples, group.batch_id
                )
        return fresh

    async def group(self, group_id: str) -> StoredGroup:
        return _view(self._entry(group_id))

    async def started(self, job_id: str, failures: int = 0, *, at_once: bool = True) -> None:
        entry, sample = self._job(job_id)
        entry.attempts[sample] += 1
        entry.failures[sample] = failures

    async def record(self, result: Result) -> Result:
        entry = self._entry(result.group_id)
        known = entry.outcomes[result.sample]
        if known is not None:
            return self._results.get(known.cursor, result.model_copy(update={"cursor": known.cursor}))
        self._cursor += 1
        result = result.model_copy(update={"cursor": self._cursor})
        entry.outcomes[result.sample] = StoredOutcome(
            result.state,
            result.reward,
            result.failure.kind if result.failure else None,
            result.attempts,
            result.cursor,
        )
        entry.attempts[result.sample] = result.attempts
        entry.kept += 1
        self._results[result.cursor] = result
        self._recorded_at.append(self._now())
        tokens = self._unread[result.cursor] = token_count(result)
        self._unread_tokens += tokens
        self._tokens += tokens
        self._trim()
        return result

    async def newest(self) -> int:
        return self._cursor

    async def results(
        self, after: int, limit: int, *, max_tokens: int = PAGE_TOKENS, only: Selection = ALL
    ) -> list[Result]:
        if 0 < after < self._dropped and (dropped := self._newest_lost(after, only)):
            raise expired(dropped, after)
        return first_page(self._after(after, only), limit, max_tokens)

    def acknowledge(self, cursors: Collection[int]) -> None:
        for cursor in cursors:
            self._unread_tokens -= self._unread.pop(cursor, 0)

    @property
    def unread(self) -> UnreadResults:
        return UnreadResults(len(self._unread), self._unread_tokens, self._unread_dropped)

    async def cursors(self, after: int, up_to: int, only: Selection = ALL) -> list[int]:
        return [result.cursor for result in self._after(after, only) if result.cursor <= up_to]

    async def summaries(self, after: int, limit: int, *, only: Selection = ALL) -> list[Summary]:
        return [summarise(result) for result in islice(self._after(after, only), limit)]

    async def search(self, text: str, after: int, limit: int, *, only: Selection = ALL) -> SearchHits:
        page = list(islice(self._after(after, only), limit))
        bodies = ((result.cursor, body_of(result)) for result in page)
        return await asyncio.to_thread(look_through, bodies, text, after)

    async def result(self, job_id: str) -> Result:
        entry, sample = self._job(job_id)
        outcome = entry.outcomes[sample]
        if outcome is None:
            raise NotFound(f"job {job_id!r} is not finished", hint="ask again when it is")
        if outcome.cursor not in self._results:
            raise NotFound(f"the result of job {job_id!r} is no longer kept")
        return self._results[outcome.cursor]

    async def unfinished(self) -> list[StoredGroup]:
        return [_view(entry) for entry in self._entries.values() if not entry.complete]

    async def open_batch(self, batch: StoredBatch) -> None:
        batch_id = batch.request.id
        if any(split_job_id(group_id)[0] == batch_id for group_id in self._entries):
            raise batch_conflict(batch_id)
        self._batches[batch_id] = batch
        for group_id in batch.carried:
            self._entry(group_id).batch_id = batch_id

    async def extend_batch(
        self, batch_id: str, first: int, tasks: Sequence[BatchTask], *, closed: bool
    ) -> None:
        batch = self._batches[batch_id]
        self._batches[batch_id] = replace(batch, appended=(*batch.appended, *tasks), closed=closed)

    async def cancel_batch(self, batch_id: str) -> int:
        self._batches[batch_id] = replace(self._batches[batch_id], cancelled_at=self._cursor)
        return self._cursor

    async def drop_batch(self, batch_id: str) -> None:
        del self._batches[batch_id]
        for entry in [entry for entry in self._entries.values() if entry.batch_id == batch_id]:
            entry.batch_id = None
            self._forget_if_gone(entry)

    async def batches(self) -> list[tuple[StoredBatch, list[StoredGroup]]]:
        groups: dict[str | None, list[StoredGroup]] = {}
        for entry in self._entries.values():
            groups.setdefault(entry.batch_id, []).append(_view(entry))
        return [(batch, groups.get(name, [])) for name, batch in self._batches.items()]

    async def keep(self, name: str, value: str) -> None:
        self._values[name] = value

    async def kept(self, name: str) -> str | None:
        return self._values.get(name)

    async def aclose(self) -> None:
        """Do nothing."""

    def _after(self, after: int, only: Selection) -> Iterator[Result]:
        first = max(after, self._dropped) + 1
        kept = (self._results[cursor] for cursor in range(first, self._cursor + 1))
        return (result for result in kept if result in only)

    def _entry(self, group_id: str) -> _Entry:
        entry = self._entries.get(group_id)
        if entry is None:
            raise NotFound(f"no group {group_id!r}")
        return entry

    def _job(self, job_id: str) -> tuple[_Entry, int]:
        group_id, sample = split_job_id(job_id)
        entry = self._entries.get(group_id)
        if entry is None or not 0 <= sample < len(entry.outcomes):
            raise NotFound(f"no job {job_id!r}")
        return entry, sample

    def _trim(self) -> None:
        """Drop the oldest results over the bounds; the newest always stays."""
        while len(self._results) > 1 and self._over():
            self._dropped, oldest = self._results.popitem(last=False)
            self._recorded_at.popleft()
            self._tokens -= token_count(oldest)
            if self._dropped in self._unread:
                self._unread_tokens -= self._unread.pop(self._dropped)
                self._unread_dropped += 1
            self._lost.append(_Dropped(oldest.cursor, oldest.group_id, oldest.environment, oldest.state))
            if len(self._lost) > KNOWN_DROPPED:
                self._forgotten = self._lost.popleft().cursor
            entry = self._entries[oldest.group_id]
            entry.kept -= 1
            self._forget_if_gone(entry)

    def _newest_lost(self, after: int, only: Selection) -> int:
        """Return the greatest cursor after `after` of a dropped result that may be one of the selection, or
        0."""
        for dropped in reversed(self._lost):
            if dropped.cursor <= after:
                break
            if only.accepts(dropped.group_id, dropped.environment, dropped.state):
                return dropped.cursor
        return self._forgotten if after < self._forgotten else 0

    def _over(self) -> bool:
        if len(self._results) > self._max_results or self._tokens > self._max_tokens:
            return True
        return self._ttl_s is not None and self._now() - self._recorded_at[0] > self._ttl_s

    def _forget_if_gone(self, entry: _Entry) -> None:
        if entry.kept == 0 and entry.complete and entry.batch_id is None:
            del self._entries[entry.group.request.id]


def _view(entry: _Entry) -> StoredGroup:
    return StoredGroup(
        entry.group.request,
        entry.group.task_id,
        tuple(entry.outcomes),
        tuple(entry.attempts),
        tuple(entry.failures),
        entry.batch_id,
        entry.group.weight_version,
    )


class Recent:
    """Cache of the newest results of a store, so that following clients need no database reads."""

    def __init__(self) -> None:
        self._results: deque[Result] = deque()
        self._tokens = 0

    @property
    def newest(self) -> int:
        """Greatest cursor; 0 if there is no result."""
        return self._results[-1].cursor if self._results else 0

    def add(self, results: Sequence[Result], *, dropped: int) -> None:
        """Add further results in the order of their cursors, and drop those up to `dropped`."""
        self._results += results
        self._tokens += sum(map(token_count, results))
        while self._results and (
            self._results[0].cursor <= dropped
            or len(self._results) > RECENT_RESULTS
            or self._tokens > RECENT_TOKENS
        ):
            self._tokens -= token_count(self._results.popleft())

    def after(self, cursor: int) -> Iterator[Result] | None:
        """Return the results after a cursor; None if the cache may not hold all of them."""
        if not self._results or cursor < self._results[0].cursor - 1:
            return None
        # Searches from the end: most readers have read nearly all results.
        older = (count for count, result in enumerate(reversed(self._results)) if result.cursor <= cursor)
        newer = next(older, len(self._results))
        return islice(self._results, len(self._results) - newer, None)


def first_page(results: Iterable[Result], limit: int, max_tokens: int) -> list[Result]:
    """Return the first of these results: see `Store.results`."""
    page: list[Result] = []
    for result in results:
        max_tokens -= token_count(result)
        if page and max_tokens < 0:
            break
        page.append(result)
        if len(page) == limit:
            break
    return page


def token_count(result: Result) -> int:
    """Return the number of tokens of a result's rows."""
    return sum(len(row.ids) for row in result.rows)


def conflict(group_id: str) -> Conflict:
    """Return the error for a group id that is taken."""
    return Conflict(f"group {group_id!r} is known with another request", hint="use a new id")


def batch_conflict(batch_id: str) -> Conflict:
    """Return the error for a batch id whose group ids are taken."""
    return Conflict(f"a group is called {batch_id}/<index> already", hint="use a new id for the batch")


def expired(dropped: int, after: int) -> CursorExpired:
    """Return the error for the cursor `after` if the results up to `dropped` are no longer kept."""
    return CursorExpired(
        f"results after {after}, up to {dropped}, are no longer kept",
        hint="another reader has read them, or the store is in memory; read from 0, the oldest result kept",
    )
