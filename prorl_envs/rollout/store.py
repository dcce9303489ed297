"""Where groups and results are kept: the interface, and the store in memory.

The store knows what was asked for, how often each job was started, and what came of it. What happens in
between is the service's, so a job costs three writes however many turns it takes.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from prorl_envs.errors import FailureKind
from prorl_envs.rollout.batch_types import BatchRequest, BatchTask
from prorl_envs.rollout.errors import Conflict, CursorExpired, NotFound
from prorl_envs.rollout.looking import Hits, body_of, look_through, summarise
from prorl_envs.rollout.types import GroupRequest, JobState, Result, split_job_id
from prorl_envs.viewer.summary import Summary

#: Most tokens of one page of results: a token is some 25 bytes of JSON.
PAGE_TOKENS = 500_000
#: Of what has been recorded last and is kept in memory too: some 20 MB at most.
RECENT_RESULTS, RECENT_TOKENS = 256, 200_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is remembered of a finished job as long as its group is."""

    state: JobState
    reward: float | None
    failure: FailureKind | None
    attempts: int
    cursor: int


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group and what has come of it.

    Args:
        request: as it was submitted.
        task_id: id of its task.
        outcomes: one per sample, None where it is not finished.
        attempts: how often each sample was started.
        failures: how many of these attempts had failed when the last one started.
        batch_id: the batch that it counts for, or None.
        weight_version: named by the batch that began it.
    """

    request: GroupRequest
    task_id: str
    outcomes: tuple[Outcome | None, ...]
    attempts: tuple[int, ...]
    failures: tuple[int, ...]
    batch_id: str | None = None
    weight_version: int | None = None

    @property
    def begun_by(self) -> str | None:
        """The batch that began it, which need not be the one that it counts for."""
        return split_job_id(self.request.id)[0] if self.batch_id else None

    @property
    def complete(self) -> bool:
        return None not in self.outcomes


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A group as it is submitted, with the id of its validated task, and the batch that begins it."""

    request: GroupRequest
    task_id: str
    batch_id: str | None = None
    weight_version: int | None = None


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch as it was submitted, and what was added since. What became of it follows from its groups.

    Args:
        request: with the first tasks.
        tenant: whose place in the queue it has.
        carried: ids of groups taken over from `request.carry_from`; `dropped`: how many were too old.
        appended: further tasks.
        closed: no more tasks come.
        cancelled_at: cursor of the newest result when it was cancelled, or None.
    """

    request: BatchRequest
    tenant: str
    carried: tuple[str, ...] = ()
    dropped: int = 0
    appended: tuple[BatchTask, ...] = ()
    closed: bool = True
    cancelled_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which results a reader wants. Of each kind: one of these, or any where none is named.

    Args:
        groups: ids of groups.
        environments: names of environments.
        states: final states.
        prefix: how the ids of their groups begin.
    """

    groups: frozenset[str] = frozenset()
    environments: frozenset[str] = frozenset()
    states: frozenset[JobState] = frozenset()
    prefix: str = ""

    def __contains__(self, result: Result) -> bool:
        return (
            (not self.groups or result.group_id in self.groups)
            and result.group_id.startswith(self.prefix)
            and (not self.environments or result.environment in self.environments)
            and (not self.states or result.state in self.states)
        )


#: Every result.
ALL = Selection()


class Store(Protocol):
    """Groups by id, results by cursor. Calls may come from many tasks at once.

    A store on a disk raises `Unavailable` from any method when the disk fails it.
    """

    @property
    def durable(self) -> bool:
        """Whether what it keeps outlives the process."""
        ...

    async def submit(self, groups: Sequence[NewGroup]) -> list[bool]:
        """Keep new groups, all or none of them.

        Returns:
            For each group whether it is new; False where the very same request is known already.

        Raises:
            Conflict: an id is known with another request, or twice in `groups` with different ones.
        """
        ...

    async def group(self, group_id: str) -> StoredGroup:
        """Raises: NotFound."""
        ...

    async def started(self, job_id: str, failures: int = 0, *, at_once: bool = True) -> None:
        """Count an attempt at a job.

        Args:
            failures: how many attempts before it failed; the others were interrupted.
            at_once: return when it is kept. Else it is kept with what is written next, and soon: a service
                that is killed just then has not counted it.

        Raises:
            NotFound: no such job.
        """
        ...

    async def record(self, result: Result) -> Result:
        """Keep the result of a job and give it its cursor. The first result of a job stays: recording
        another returns the first. Who records at the same time gets to know in the order of the cursors.

        Raises:
            NotFound: its group is not known.
        """
        ...

    async def newest(self) -> int:
        """The greatest cursor there is; 0 where there is none."""
        ...

    async def results(
        self, after: int, limit: int, *, max_tokens: int = PAGE_TOKENS, only: Selection = ALL
    ) -> list[Result]:
        """Results with a cursor greater than `after`, in order, at most `limit`. 0 is the oldest kept.

        Args:
            max_tokens: tokens of all their trajectories; the first comes however many it has.
            only: which of them.

        Raises:
            CursorExpired: results between `after` and the oldest kept are gone.
        """
        ...

    async def summaries(self, after: int, limit: int, *, only: Selection = ALL) -> list[Summary]:
        """The same results in short, whatever is gone."""
        ...

    async def search(self, text: str, after: int, limit: int, *, only: Selection = ALL) -> Hits:
        """Which results with a cursor greater than `after` have a text in a string; a step of it, that looks
        at `limit` of them at most."""
        ...

    async def result(self, job_id: str) -> Result:
        """Raises: NotFound: no such job, it is not finished, or its result is no longer kept."""
        ...

    async def unfinished(self) -> list[StoredGroup]:
        """Groups that are not complete, oldest first: what a restarted service goes on with."""
        ...

    async def open_batch(self, batch: StoredBatch) -> None:
        """Keep a new batch, under an id that is not taken; the groups it carries are its own from now on.

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
        """Remember that a batch was cancelled. Returns the cursor of the newest result there is then."""
        ...

    async def drop_batch(self, batch_id: str) -> None:
        """Forget a batch. Its groups stay as long as their results, as those of no batch do."""
        ...

    async def batches(self) -> list[tuple[StoredBatch, list[StoredGroup]]]:
        """Every batch with its groups, oldest first. A batch's groups stay as long as it does, whatever
        becomes of their results."""
        ...

    async def keep(self, name: str, value: str) -> None:
        """Keep a value under a name, instead of what was there: what a service must know when it goes on."""
        ...

    async def kept(self, name: str) -> str | None:
        """The value under a name, or None."""
        ...

    async def aclose(self) -> None: ...


@dataclass(slots=True)
class _Entry:
    group: NewGroup
    outcomes: list[Outcome | None]
    attempts: list[int]
    failures: list[int]
    batch_id: str | None
    kept: int = 0  # results of this group still kept

    @property
    def complete(self) -> bool:
        return None not in self.outcomes


class MemoryStore:
    """A store that lasts as long as the process.

    Args:
        max_results: results kept; the oldest go first, and a complete group goes with its last result.
        max_tokens: tokens of all trajectories kept.
        max_age_s: seconds that results are kept; None is no bound. Older ones go when a result comes.
        now: seconds, from any moment on.
    """

    durable = False

    def __init__(
        self,
        *,
        max_results: int = 100_000,
        max_tokens: int = 50_000_000,
        max_age_s: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_results = max_results
        self._max_tokens = max_tokens
        self._max_age_s = max_age_s
        self._now = now
        self._recorded_at: deque[float] = deque()  # of each result kept
        self._entries: dict[str, _Entry] = {}
        self._results: OrderedDict[int, Result] = OrderedDict()
        self._tokens = 0
        self._cursor = 0
        self._dropped = 0  # cursor of the newest result no longer kept
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
        entry.outcomes[result.sample] = Outcome(
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
        self._tokens += token_count(result)
        self._trim()
        return result

    async def newest(self) -> int:
        return self._cursor

    async def results(
        self, after: int, limit: int, *, max_tokens: int = PAGE_TOKENS, only: Selection = ALL
    ) -> list[Result]:
        if 0 < after < self._dropped:
            raise expired(self._dropped, after)
        return first_page(self._after(after, only), limit, max_tokens)

    async def summaries(self, after: int, limit: int, *, only: Selection = ALL) -> list[Summary]:
        return [summarise(result) for result in islice(self._after(after, only), limit)]

    async def search(self, text: str, after: int, limit: int, *, only: Selection = ALL) -> Hits:
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
        """Nothing to end."""

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
            entry = self._entries[oldest.group_id]
            entry.kept -= 1
            self._forget_if_gone(entry)

    def _over(self) -> bool:
        if len(self._results) > self._max_results or self._tokens > self._max_tokens:
            return True
        return self._max_age_s is not None and self._now() - self._recorded_at[0] > self._max_age_s

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
    """The results that a store has recorded last, for those who follow them: they need not be read back."""

    def __init__(self) -> None:
        self._results: deque[Result] = deque()
        self._tokens = 0

    @property
    def newest(self) -> int:
        """The greatest cursor; 0 where there is no result."""
        return self._results[-1].cursor if self._results else 0

    def add(self, results: Sequence[Result], *, dropped: int) -> None:
        """Keep further results in the order of their cursors, and forget those up to `dropped`."""
        self._results += results
        self._tokens += sum(map(token_count, results))
        while self._results and (
            self._results[0].cursor <= dropped
            or len(self._results) > RECENT_RESULTS
            or self._tokens > RECENT_TOKENS
        ):
            self._tokens -= token_count(self._results.popleft())

    def after(self, cursor: int) -> Iterator[Result] | None:
        """The results after a cursor; None where older ones than these may be among them."""
        if not self._results or cursor < self._results[0].cursor - 1:
            return None
        # From the end: who follows has read nearly all.
        older = (count for count, result in enumerate(reversed(self._results)) if result.cursor <= cursor)
        newer = next(older, len(self._results))
        return islice(self._results, len(self._results) - newer, None)


def first_page(results: Iterable[Result], limit: int, max_tokens: int) -> list[Result]:
    """The first of these results: see `Store.results`."""
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
    """Tokens of a result's trajectory."""
    return sum(len(row.ids) for row in result.rows)


def conflict(group_id: str) -> Conflict:
    """The id of a group is taken."""
    return Conflict(f"group {group_id!r} is known with another request", hint="use a new id")


def batch_conflict(batch_id: str) -> Conflict:
    """The id of a group is one that a new batch would give."""
    return Conflict(f"a group is called {batch_id}/<index> already", hint="use a new id for the batch")


def expired(dropped: int, after: int) -> CursorExpired:
    """`after` was asked for, and the results up to `dropped` are gone."""
    return CursorExpired(
        f"results up to {dropped} are no longer kept, and {after} was asked for",
        hint="read from 0, the oldest result kept, and read more often",
    )
