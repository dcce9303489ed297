"""Store of groups and results: the interface, its records and errors.

The store contains the requests, the number of attempts of each job, and the results. The state of a running
job is not stored, so a job takes three writes, independent of its number of turns.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from prorl_envs.errors import FailureKind
from prorl_envs.rollout.api.batches import BatchRequest, BatchTask
from prorl_envs.rollout.api.errors import Conflict, CursorExpired
from prorl_envs.rollout.api.types import ALL, GroupRequest, JobState, Result, Selection, split_job_id
from prorl_envs.rollout.store.summaries import SearchHits
from prorl_envs.viewer.summary import Summary

#: Maximum number of tokens in one page of results. A token takes some 25 bytes of JSON.
PAGE_TOKENS = 500_000
#: Maximum number of dropped results whose group, environment and state are stored.
KNOWN_DROPPED = 100_000
#: Maximum numbers of results and tokens that are also cached in memory: some 20 MB.
RECENT_RESULTS, RECENT_TOKENS = 256, 200_000


@dataclass(frozen=True, slots=True)
class StoredOutcome:
    """Outcome of a finished job. It is stored as long as the job's group."""

    state: JobState
    reward: float | None
    failure: FailureKind | None
    attempts: int
    cursor: int


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Group with the outcomes of its jobs.

    Args:
        request: the submitted request.
        task_id: id of the group's task.
        outcomes: one per sample, None if the sample is not finished.
        attempts: number of attempts of each sample.
        failures: number of attempts of each sample that had failed when its last attempt started.
        batch_id: the batch that the group counts for, or None.
        weight_version: weight version in the request of the batch that started the group.
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
        """Id of the batch that started the group. A later batch may have taken the group over."""
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
    """Stored batch. Its progress is not stored, since it follows from the batch's groups.

    Args:
        request: the submitted request, with the first tasks.
        tenant: name of the batch's lane in the queue.
        carried: groups taken over from `request.carry_from`; `dropped`: number of groups that were too old.
        appended: tasks that were appended later.
        closed: no more tasks will follow.
        cancelled_at: cursor of the newest result when the batch was cancelled; None if it was not cancelled.
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
        results: number of unread results; `tokens`: number of tokens in their trajectories.
        dropped: number of unread results that the store has dropped; always 0 in a durable store.
    """

    results: int = 0
    tokens: int = 0
    dropped: int = 0

    def __add__(self, change: "UnreadResults") -> "UnreadResults":
        return UnreadResults(
            self.results + change.results, self.tokens + change.tokens, self.dropped + change.dropped
        )


class Store(Protocol):
    """Store of groups by id and results by cursor. Many asyncio tasks may call it at once.

    Every method may raise `Unavailable`, if the database cannot be read or written.
    """

    @property
    def durable(self) -> bool:
        """True if the data outlives the process."""
        ...

    async def submit(self, groups: Sequence[NewGroup]) -> list[bool]:
        """Store all of these groups, or none of them.

        Returns:
            For each group, True if it is new; False if the same request is stored already.

        Raises:
            Conflict: an id is stored with another request, or occurs in `groups` with different requests.
        """
        ...

    async def group(self, group_id: str) -> StoredGroup:
        """Return a group. Raises NotFound if there is no such group."""
        ...

    async def started(self, job_id: str, failures: int = 0, *, at_once: bool = True) -> None:
        """Count a started attempt of a job.

        Args:
            failures: number of earlier attempts that failed. The other earlier attempts were interrupted.
            at_once: return once the attempt is stored. Otherwise it is stored soon, with the next write. If
                the service is killed before that, the attempt is not counted.

        Raises:
            NotFound: no such job.
        """
        ...

    async def record(self, result: Result) -> Result:
        """Store the result of a job and assign its cursor. If the job has a result already, nothing is stored
        and that result is returned. Concurrent calls return in the order of the cursors.

        Raises:
            NotFound: the job's group is not stored.
        """
        ...

    async def newest(self) -> int:
        """Return the greatest cursor; 0 if there is no result."""
        ...

    async def results(
        self, after: int, limit: int, *, max_tokens: int = PAGE_TOKENS, only: Selection = ALL
    ) -> list[Result]:
        """Return results in the order of their cursors.

        Args:
            after: return results after this cursor; 0 starts with the oldest.
            limit: maximum number of results.
            max_tokens: maximum number of tokens of all results, except that one result is always returned.
            only: filter for results.

        Raises:
            CursorExpired: results after `after` that the filter accepts are no longer stored.
        """
        ...

    def acknowledge(self, cursors: Collection[int]) -> None:
        """Mark results as read, so that they may be dropped. A durable store drops only read results.

        The marks are stored soon, with the next write. If the service is killed before that, the results stay
        unread. Cursors without a stored result are ignored.
        """
        ...

    @property
    def unread(self) -> UnreadResults:
        """Number of unread results."""
        ...

    async def cursors(
        self, after: int, up_to: int, only: Selection = ALL, *, unread: bool = False
    ) -> list[int]:
        """Return the cursors of the stored results after `after`, up to and including `up_to`. With `unread`,
        return only cursors of unread results."""
        ...

    async def summaries(self, after: int, limit: int, *, only: Selection = ALL) -> list[Summary]:
        """Return summaries of results, with the arguments of `results`. Never raises CursorExpired."""
        ...

    async def search(self, text: str, after: int, limit: int, *, only: Selection = ALL) -> SearchHits:
        """Run one step of a text search, over at most `limit` results after the cursor `after`. A result is a
        hit if one of its strings contains the text."""
        ...

    async def result(self, job_id: str) -> Result:
        """Return the result of a job. Raises NotFound for unknown and unfinished jobs and dropped results."""
        ...

    async def unfinished(self) -> list[StoredGroup]:
        """Return the incomplete groups, oldest first. A restarted service resumes them."""
        ...

    async def open_batch(self, batch: StoredBatch) -> None:
        """Store a new batch, whose id is unused, and assign its carried groups to it.

        Raises:
            Conflict: the id of a stored group has the form of the batch's group ids, `<id>/<index>`.
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
        """Delete a batch, but not its groups. They are then stored as long as their results."""
        ...

    async def batches(self) -> list[tuple[StoredBatch, list[StoredGroup]]]:
        """Return every batch with its groups, oldest first. A batch's groups are stored as long as the batch,
        even if their results are dropped."""
        ...

    async def put_value(self, name: str, value: str) -> None:
        """Store a value under a name, in place of the previous value, for a restarted service."""
        ...

    async def get_value(self, name: str) -> str | None:
        """Return the value stored under a name, or None."""
        ...

    async def aclose(self) -> None: ...


class Recent:
    """Cache of the newest results of a store. Clients that follow the results need no database reads."""

    def __init__(self) -> None:
        self._results: deque[Result] = deque()
        self._tokens = 0

    @property
    def newest(self) -> int:
        """Greatest cursor; 0 if there is no result."""
        return self._results[-1].cursor if self._results else 0

    def add(self, results: Sequence[Result], *, dropped: int) -> None:
        """Add newer results in the order of their cursors, and drop results up to the cursor `dropped`."""
        self._results += results
        self._tokens += sum(map(token_count, results))
        while self._results and (
            self._results[0].cursor <= dropped
            or len(self._results) > RECENT_RESULTS
            or self._tokens > RECENT_TOKENS
        ):
            self._tokens -= token_count(self._results.popleft())

    def after(self, cursor: int) -> Iterator[Result] | None:
        """Return the results after a cursor, or None if the cache may lack some of them."""
        if not self._results or cursor < self._results[0].cursor - 1:
            return None
        # Searches from the end: most readers have read nearly all results.
        older = (count for count, result in enumerate(reversed(self._results)) if result.cursor <= cursor)
        newer = next(older, len(self._results))
        return islice(self._results, len(self._results) - newer, None)


def first_page(results: Iterable[Result], limit: int, max_tokens: int) -> list[Result]:
    """Return the first of these results that fit into a page, see `Store.results`."""
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
    return Conflict(f"there is a group {batch_id}/<index> already", hint="use a new id for the batch")


def expired(dropped: int, after: int) -> CursorExpired:
    """Return the error for the cursor `after` if results up to `dropped` are no longer stored."""
    return CursorExpired(
        f"results after {after}, up to {dropped}, are no longer kept",
        hint="another reader has read them, or the store is in memory; 0 reads from the oldest kept result",
    )
