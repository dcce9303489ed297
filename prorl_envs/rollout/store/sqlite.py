"""SQL store with one writing thread, and its SQLite databases, in a file and in memory.

A write returns when it is on the disk. Writes that arrive during a transaction are committed together in the
next transaction, so they share the cost of a flush. Reads have their own connection and thread, and never
wait for a write. Clients that follow the results receive them from memory. Each result is written once, with
its token arrays as compressed machine numbers.

The file must be on a local disk, and belongs to one service at a time. For the reasons, and for the behaviour
with a full disk, see `docs/decisions/store.md`. The PostgreSQL store is in `postgres.py`.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import sqlite3
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from prorl_envs.errors import FailureKind, InputError, ProrlError
from prorl_envs.rollout.api.batches import BatchTask
from prorl_envs.rollout.api.dashboard import SearchPage
from prorl_envs.rollout.api.errors import Conflict, CursorExpired, NotFound, Unavailable
from prorl_envs.rollout.api.summary import Summary
from prorl_envs.rollout.api.types import ALL, GroupRequest, JobState, Result, Selection, split_job_id
from prorl_envs.rollout.store import sql_queries, sqlite_batches
from prorl_envs.rollout.store.base import (
    KNOWN_DROPPED,
    PAGE_TOKENS,
    NewGroup,
    Recent,
    StoredBatch,
    StoredGroup,
    StoredOutcome,
    UnreadResults,
    first_page,
    token_count,
)
from prorl_envs.rollout.store.sql_queries import WITHOUT_RESULTS, DbConnection, condition, newest_dropped
from prorl_envs.rollout.store.sqlite_schema import deflate, lock, open_file, open_in_memory, pack, unpack

#: Rows per query when the oldest results are dropped; usually one result exceeds the limits. Maximum number
#: of such queries in one transaction: 50,000 drops take 5 s, and other writes wait for them.
_TRIM_ROWS, _MAX_TRIMS = 16, 64
#: Value of `SqlStore._oldest` if no result was read: cursor, tokens and time that never exceed a limit.
_NOTHING_READ = (math.inf, math.inf, math.inf)
#: Number of drops after which the oldest rows of `dropped_results` are removed. A row takes some 60 bytes.
_FORGET_EVERY = 1_000
#: Maximum number of acknowledged results in one statement.
_ACKNOWLEDGED_AT_ONCE = 500
#: Seconds for which a write without a waiting caller waits for other writes, to share their transaction, and
#: seconds before it is tried again after its transaction failed.
_JOIN_S, _RETRY_S = 0.05, 1.0
#: Seconds after a failed write for which the store counts as not writable.
_FAILURE_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Write:
    """Pending write, see `SqlStore._write`. `future` is None if no caller waits."""

    work: Callable[[], Any]
    future: asyncio.Future[Any] | None


class SqlStore:
    """Store of groups and results in an SQL database. It must be used in one event loop, and must be closed.

    Results are dropped, oldest first, if there are more than `max_results` results or `max_tokens` tokens, or
    if they are older than `ttl_s`. A durable store drops only results that were read. A complete group is
    dropped with its last result.

    Every method raises `Unavailable` if the database cannot be used. A failed write changes nothing.

    Args:
        name: name of the database in errors.
        db: connection that writes; `view`: connection that reads, which may be `db`.
        resources: closes both connections and releases the database.
        max_results, max_tokens: number of results to keep, and of tokens in all of them together.
        ttl_s: seconds for which results are kept; None means no limit. It is checked when a result is stored
            or acknowledged.
        now: returns seconds since 1970. The default is not affected by clock changes while the process runs.
    """

    #: True if the data outlives the process.
    durable = True
    #: Exceptions that the connections raise if the database fails.
    errors: ClassVar[tuple[type[Exception], ...]]

    def __init__(
        self,
        name: str,
        db: DbConnection,
        view: DbConnection,
        resources: contextlib.ExitStack,
        *,
        max_results: int = 100_000,
        max_tokens: int = 50_000_000,
        ttl_s: float | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._name = name
        self._db = db
        self._view = view
        self._resources = resources
        self._max_results = max_results
        self._max_tokens = max_tokens
        self._ttl_s = ttl_s
        self._now = now or steady_time()
        #: Cursor of the newest result, and number of tokens of all results up to it. None if unknown.
        self._last: tuple[int, int] | None = None
        #: Oldest result that may be dropped: cursor, number of tokens before it, and time. None if unknown.
        self._oldest: tuple[float, float, float] | None = None
        #: State of the transaction: recorded results, change of `unread`, whether results are left to drop.
        self._recorded: list[Result] = []
        self._unread_change = UnreadResults()
        self._more_to_drop = False
        #: Greatest cursor of a dropped result, and number of dropped results.
        self._dropped, self._drops = 0, 0
        self._recent = Recent()
        self._waiting: list[_Write] = []
        self._committing: asyncio.Future[None] | None = None  # done when no caller waits for a write
        self._timer: asyncio.TimerHandle | None = None  # start of a transaction that no caller waits for
        #: Time of the last failed write; None if a later write succeeded.
        self._failed_at: float | None = None
        self._closed = False
        self._writer = ThreadPoolExecutor(1, "store-write")
        self._reader = self._writer if view is db else ThreadPoolExecutor(1, "store-read")
        try:
            self._unread = self._count_unread()
        except self.errors as error:
            resources.close()
            raise InputError(f"the store {name} cannot be read: {str(error).strip()}") from error

    async def submit(self, groups: Sequence[NewGroup]) -> list[bool]:
        """Store all of these groups, or none of them.

        Returns:
            For each group, True if it is new; False if the same request is stored already.

        Raises:
            Conflict: an id is stored with another request, or occurs in `groups` with different requests.
        """
        return await self._write(partial(self._submit, groups))

    async def started(self, job_id: str, failures: int = 0, *, at_once: bool = True) -> None:
        """Count a started attempt of a job.

        Args:
            failures: number of earlier attempts that failed. The other earlier attempts were interrupted.
            at_once: return once the attempt is stored. Otherwise it is stored soon, with the next write. If
                the service is killed before that, the attempt is not counted.

        Raises:
            NotFound: no such job.
        """
        work = partial(self._started, job_id, failures)
        if at_once:
            await self._write(work)
        else:
            self._write_with_others(work)

    async def record(self, result: Result) -> Result:
        """Store the result of a job and assign its cursor. If the job has a result already, nothing is stored
        and that result is returned. Concurrent calls return in the order of the cursors.

        Raises:
            NotFound: the job's group is not stored.
        """
        return await self._write(partial(self._record, result))

    def acknowledge(self, cursors: Collection[int]) -> None:
        """Mark results as read, so that they may be dropped. A durable store drops only read results.

        The marks are stored soon, with the next write. If the service is killed before that, the results stay
        unread. Cursors without a stored result are ignored.
        """
        if cursors:
            self._write_with_others(partial(self._acknowledge, tuple(cursors)))

    @property
    def unread(self) -> UnreadResults:
        """Number of unread results."""
        return self._unread

    async def group(self, group_id: str) -> StoredGroup:
        """Return a group. Raises NotFound if there is no such group."""
        return await self._read(partial(self._group, group_id))

    async def newest(self) -> int:
        """Return the greatest cursor; 0 if there is no result."""
        self._check_open()
        return self._recent.newest or await self._read(self._newest)

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
        self._check_open()
        if (recent := self._recent.after(after)) is not None:
            return first_page((result for result in recent if result in only), limit, max_tokens)
        return await self._read(partial(self._results, after, limit, max_tokens, only))

    async def cursors(
        self, after: int, up_to: int, only: Selection = ALL, *, unread: bool = False
    ) -> list[int]:
        """Return the cursors of the stored results after `after`, up to and including `up_to`. With `unread`,
        return only cursors of unread results."""
        return await self._read(partial(sql_queries.cursors, self._view, after, up_to, only, unread=unread))

    async def summaries(self, after: int, limit: int, *, only: Selection = ALL) -> list[Summary]:
        """Return summaries of results, with the arguments of `results`. Never raises CursorExpired."""
        return await self._read(partial(sql_queries.summaries, self._view, after, limit, only))

    async def search(self, text: str, after: int, limit: int, *, only: Selection = ALL) -> SearchPage:
        """Run one step of a text search, over at most `limit` results after the cursor `after`. A result is a
        hit if one of its strings contains the text."""
        return await self._read(partial(sql_queries.search, self._view, text, after, limit, only))

    async def result(self, job_id: str) -> Result:
        """Return the result of a job. Raises NotFound for unknown and unfinished jobs and dropped results."""
        return await self._read(partial(self._result, job_id))

    async def unfinished(self) -> list[StoredGroup]:
        """Return the incomplete groups, oldest first. A restarted service resumes them."""
        return await self._read(self._unfinished)

    async def open_batch(self, batch: StoredBatch) -> None:
        """Store a new batch, whose id is unused, and assign its carried groups to it.

        Raises:
            Conflict: the id of a stored group has the form of the batch's group ids, `<id>/<index>`.
        """
        await self._write(partial(sqlite_batches.insert, self._db, batch))

    async def extend_batch(
        self, batch_id: str, first: int, tasks: Sequence[BatchTask], *, closed: bool
    ) -> None:
        """Append tasks to a batch's stream, the first of them at the index `first`."""
        await self._write(partial(sqlite_batches.extend, self._db, batch_id, first, tasks, closed=closed))

    async def cancel_batch(self, batch_id: str) -> int:
        """Mark a batch as cancelled. Returns the cursor of the newest result at that time."""
        return await self._write(partial(sqlite_batches.cancel, self._db, batch_id))

    async def drop_batch(self, batch_id: str) -> None:
        """Delete a batch, but not its groups. They are then stored as long as their results."""
        await self._write(partial(sqlite_batches.drop, self._db, batch_id))

    async def batches(self) -> list[tuple[StoredBatch, list[StoredGroup]]]:
        """Return every batch with its groups, oldest first. A batch's groups are stored as long as the batch,
        even if their results are dropped."""
        return await self._read(self._batches)

    async def put_value(self, name: str, value: str) -> None:
        """Store a value under a name, in place of the previous value, for a restarted service."""
        await self._write(partial(self._put_value, name, value))

    async def get_value(self, name: str) -> str | None:
        """Return the value stored under a name, or None."""
        return await self._read(partial(self._get_value, name))

    async def aclose(self) -> None:
        """Finish pending writes and release the file. Idempotent."""
        self._closed = True
        if self._waiting:
            self._commit_soon()
        if self._committing is not None:
            await asyncio.wait([self._committing])
        for executor in (self._writer, self._reader):
            await asyncio.to_thread(executor.shutdown)
        await asyncio.to_thread(self._resources.close)

    def check_writable(self) -> None:
        """Check that the last write succeeded, or failed long ago: a later one may succeed.

        Raises:
            Unavailable: it failed within the last half minute.
        """
        if self._failed_at is not None and time.monotonic() - self._failed_at < _FAILURE_S:
            raise Unavailable("the store cannot be written", hint="the service's log has the reason")

    # Between the event loop and the threads.

    async def _write[T](self, work: Callable[[], T]) -> T:
        """Run `work` in the next transaction. Returns once the transaction is on the disk. If the caller is
        cancelled while it waits, the write may or may not happen."""
        self._check_open()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Write(work, future))
        self._commit_soon()
        return await future

    def _write_with_others(self, work: Callable[[], Any]) -> None:
        """Run `work` in a transaction that starts soon. Run it again later if the database fails."""
        self._check_open()
        self._waiting.append(_Write(work, None))
        self._commit_later()

    def _commit_soon(self) -> None:
        """Start a transaction in the next iteration of the event loop, or after the current transaction."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._committing is None:
            self._committing = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(self._commit)  # with all writes that arrive until then

    def _commit_later(self, delay_s: float = _JOIN_S) -> None:
        if self._committing is None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._commit_soon)

    # These are callbacks instead of a task, which would need more iterations of a busy event loop.

    def _commit(self) -> None:
        """Start a transaction with the waiting writes."""
        loop = asyncio.get_running_loop()
        batch, self._waiting = self._waiting, []

        def notify_loop(done: Future[list[Any]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
                loop.call_soon_threadsafe(self._committed, batch, done)

        works = [write.work for write in batch]
        self._writer.submit(self._transaction, works).add_done_callback(notify_loop)

    def _committed(self, batch: Sequence[_Write], done: Future[list[Any]]) -> None:
        """Resolve the futures of a finished transaction, and start the next one if writes are waiting."""
        error = done.exception()
        if error is None:
            self._recent.add(self._recorded, dropped=self._dropped)
        elif isinstance(error, self.errors) and not self._closed:
            self._waiting[:0] = [write for write in batch if write.future is None]
        self._note_outcome(error)
        self._recorded.clear()
        for write, outcome in zip(
            batch, done.result() if error is None else [error] * len(batch), strict=True
        ):
            future = write.future
            if future is None or future.done():  # no caller waits, or the caller was cancelled
                continue
            if isinstance(outcome, self.errors):
                outcome = self._unavailable("written", outcome)
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        if any(write.future is not None for write in self._waiting) or (self._closed and self._waiting):
            self._commit()
        elif self._committing is not None:
            self._committing.set_result(None)
            self._committing = None
            if self._waiting:
                self._commit_later(_JOIN_S if error is None else _RETRY_S)

    def _note_outcome(self, error: BaseException | None) -> None:
        """Log once that writes begin to fail, and that they succeed again."""
        if isinstance(error, self.errors):
            if self._failed_at is None:
                log.error("%s. Writes of accepted jobs are tried again.", self._unavailable("written", error))
            self._failed_at = time.monotonic()
        elif error is None and self._failed_at is not None:
            self._failed_at = None
            log.warning("%s can be written again", self._name)

    async def _read[T](self, work: Callable[[], T]) -> T:
        self._check_open()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, work)
        except self.errors as error:
            raise self._unavailable("read", error) from error

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed")

    def _unavailable(self, action: str, error: BaseException) -> Unavailable:
        hint = "accepted jobs are not lost; is the disk full, or the database locked or down?"
        return Unavailable(f"{self._name} cannot be {action}: {str(error).strip()}", hint=hint)

    # The following methods run in the writing thread. They refuse a request before they write anything, so
    # the other writes of the transaction remain valid.

    def _transaction(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run `works` in a transaction, and return their outcomes."""
        try:
            with self._db:  # commits, or rolls back if an error is raised
                self._db.execute("BEGIN IMMEDIATE")
                outcomes = [_value_or_refusal(work) for work in works]
                for _ in range(_MAX_TRIMS):  # later transactions drop the remaining results
                    if not self._more_to_drop:
                        break
                    self._trim()
        except BaseException:
            self._last = self._oldest = None
            self._more_to_drop = False
            self._unread_change = UnreadResults()
            raise
        self._unread += self._unread_change
        self._unread_change = UnreadResults()
        return outcomes

    def _submit(self, groups: Sequence[NewGroup]) -> list[bool]:
        new: dict[str, tuple[NewGroup, bytes]] = {}
        fresh = []
        for group in groups:
            request = group.request
            text = request.model_dump_json().encode()
            known = new[request.id][1] if request.id in new else self._request(request.id)
            if known is not None and not _same(known, text):
                raise Conflict(f"group {request.id!r} is known with another request", hint="use a new id")
            fresh.append(known is None)
            if known is None:
                new[request.id] = group, text
        for group, text in new.values():
            samples = group.request.samples
            environment, packed = group.request.environment, deflate(text)
            [number] = self._db.execute(
                "INSERT INTO groups (id, task_id, environment, request, missing, batch_id, weight_version)"
                " VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING number",
                (
                    group.request.id,
                    group.task_id,
                    environment,
                    packed,
                    samples,
                    group.batch_id,
                    group.weight_version,
                ),
            ).fetchone()
            # One statement for all jobs, since a thread waits for the interpreter lock after each statement.
            self._db.execute(
                f"INSERT INTO jobs (number, sample) VALUES {', '.join(['(?, ?)'] * samples)}",
                [value for sample in range(samples) for value in (number, sample)],
            )
        return fresh

    def _request(self, group_id: str) -> bytes | None:
        row = self._db.execute("SELECT request FROM groups WHERE id = ?", (group_id,)).fetchone()
        return zlib.decompress(row[0]) if row else None

    def _started(self, job_id: str, failures: int) -> None:
        group_id, sample = split_job_id(job_id)
        changed = self._db.execute(
            "UPDATE jobs SET attempts = attempts + 1, failures = ?"
            " WHERE number = (SELECT number FROM groups WHERE id = ?) AND sample = ?",
            (failures, group_id, sample),
        )
        if changed.rowcount == 0:
            raise NotFound(f"no job {job_id!r}")

    def _record(self, result: Result) -> Result:
        last, total = self._last_result()
        written = result.model_copy(update={"cursor": last + 1})
        kind = result.failure.kind.value if result.failure else None
        row = self._db.execute(
            "UPDATE jobs SET cursor = ?, state = ?, reward = ?, failure = ?, attempts = ?"
            " WHERE number = (SELECT number FROM groups WHERE id = ?) AND sample = ? AND cursor IS NULL"
            " RETURNING number",
            (
                written.cursor,
                result.state.value,
                result.reward,
                kind,
                result.attempts,
                result.group_id,
                result.sample,
            ),
        ).fetchone()
        if row is None:
            return self._earlier_record(result)
        self._db.execute("UPDATE groups SET missing = missing - 1 WHERE number = ?", row)
        tokens = token_count(result)
        total += tokens
        values = (written.cursor, *row, tokens, total, *pack(written), self._now())
        self._db.execute("INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        self._last = written.cursor, total
        self._recorded.append(written)
        self._unread_change += UnreadResults(1, tokens)
        self._trim()
        return written

    def _earlier_record(self, result: Result) -> Result:
        row = self._db.execute(
            "SELECT cursor FROM jobs JOIN groups USING (number) WHERE id = ? AND sample = ?",
            (result.group_id, result.sample),
        ).fetchone()
        if row is None:
            raise NotFound(f"no group {result.group_id!r}")
        stored = self._db.execute("SELECT * FROM results WHERE cursor = ?", row).fetchone()
        return unpack(stored) if stored else result.model_copy(update={"cursor": row[0]})

    def _last_result(self) -> tuple[int, int]:
        """Return the cursor of the newest result, and the number of tokens of all results up to it. The value
        is cached, since each statement waits for the interpreter lock."""
        if self._last is None:
            newest = self._db.execute("SELECT cursor, total FROM results ORDER BY cursor DESC LIMIT 1")
            self._last = newest.fetchone() or (0, 0)
        return self._last

    def _acknowledge(self, cursors: Sequence[int]) -> None:
        for chunk in itertools.batched(cursors, _ACKNOWLEDGED_AT_ONCE):
            rows = self._db.execute(
                "INSERT INTO read_results SELECT cursor, tokens FROM results"
                f" WHERE cursor IN ({', '.join('?' * len(chunk))}) ON CONFLICT DO NOTHING RETURNING tokens",
                chunk,
            ).fetchall()
            self._unread_change += UnreadResults(-len(rows), -sum(tokens for [tokens] in rows))
        if self._oldest is not None and min(cursors) < self._oldest[0]:
            self._oldest = None
        self._trim()

    def _trim(self) -> None:
        """Drop some of the oldest results that exceed the limits, but never the newest result. A durable
        store drops only read results. Sets `_more_to_drop` if there may be more of them."""
        newest, total = self._last_result()
        self._more_to_drop = False
        if self._oldest is not None and not self._exceeds(*self._oldest, newest, total):
            return
        self._oldest = None
        droppable = "read_results JOIN results USING (cursor)" if self.durable else "results"
        oldest = self._db.execute(
            f"SELECT cursor, total - results.tokens, at, number FROM {droppable}"
            f" ORDER BY cursor LIMIT {_TRIM_ROWS}"
        ).fetchall()
        for cursor, before, at, number in oldest:
            if not self._exceeds(cursor, before, at, newest, total):
                self._oldest = cursor, before, at
                return
            self._drop(cursor, number)
        self._more_to_drop = len(oldest) == _TRIM_ROWS
        if self.durable and not self._more_to_drop:
            self._oldest = _NOTHING_READ

    def _exceeds(self, cursor: float, before: float, at: float, newest: int, total: int) -> bool:
        """Return True if a result exceeds the limits. `before`: number of tokens of all results before it;
        `at`: time of its record; `newest`: cursor of the newest result; `total`: tokens of all results."""
        return cursor < newest and (
            newest - cursor >= self._max_results
            or total - before > self._max_tokens
            or (self._ttl_s is not None and self._now() - at > self._ttl_s)
        )

    def _drop(self, cursor: int, number: int) -> None:
        self._db.execute(
            "INSERT INTO dropped_results SELECT cursor, id, environment, state"
            " FROM jobs JOIN groups USING (number) WHERE number = ? AND cursor = ?",
            (number, cursor),
        )
        [tokens] = self._db.execute(
            "DELETE FROM results WHERE cursor = ? RETURNING tokens", (cursor,)
        ).fetchone()
        if self._db.execute("DELETE FROM read_results WHERE cursor = ?", (cursor,)).rowcount == 0:
            self._unread_change += UnreadResults(-1, -tokens, dropped=1)
        self._dropped = max(self._dropped, cursor)
        deleted = self._db.execute(
            f"DELETE FROM groups WHERE number = ? AND missing = 0 AND batch_id IS NULL AND {WITHOUT_RESULTS}",
            (number,),
        )
        if deleted.rowcount:
            self._db.execute("DELETE FROM jobs WHERE number = ?", (number,))
        self._drops += 1
        if self._drops % _FORGET_EVERY == 0:
            self._forget_dropped()

    def _forget_dropped(self) -> None:
        """Replace the oldest rows of `dropped_results` by one row without a group."""
        oldest = self._db.execute(
            f"SELECT cursor FROM dropped_results ORDER BY cursor DESC LIMIT 1 OFFSET {KNOWN_DROPPED}"
        ).fetchone()
        if oldest is not None:
            self._db.execute("DELETE FROM dropped_results WHERE cursor <= ?", oldest)
            self._db.execute("INSERT INTO dropped_results (cursor) VALUES (?)", oldest)

    def _put_value(self, name: str, value: str) -> None:
        self._db.execute(
            "INSERT INTO kept VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, value),
        )

    # The following methods run in the reading thread.

    def _count_unread(self) -> UnreadResults:
        results, tokens = self._view.execute(
            "SELECT count(*), coalesce(sum(tokens), 0) FROM results"
            " WHERE cursor NOT IN (SELECT cursor FROM read_results)"
        ).fetchone()
        return UnreadResults(results, int(tokens))

    def _get_value(self, name: str) -> str | None:
        row = self._view.execute("SELECT value FROM kept WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else None

    def _group(self, group_id: str) -> StoredGroup:
        for group in self._groups("id = ?", group_id):
            return group
        raise NotFound(f"no group {group_id!r}")

    def _unfinished(self) -> list[StoredGroup]:
        return list(self._groups("missing > 0"))

    def _groups(self, condition: str, *values: object) -> Iterator[StoredGroup]:
        """Yield groups in the order of their submission. A single query reads them from one snapshot."""
        rows = self._view.execute(
            "SELECT number, task_id, request, batch_id, weight_version,"
            " state, reward, failure, attempts, cursor, failures"
            f" FROM groups JOIN jobs USING (number) WHERE {condition} ORDER BY number, sample",
            values,
        ).fetchall()
        for _, jobs in itertools.groupby(rows, key=lambda row: row[0]):
            group = list(jobs)
            _, task_id, request, batch_id, weight_version, *_ = group[0]
            yield StoredGroup(
                GroupRequest.model_validate_json(zlib.decompress(request)),
                task_id,
                tuple(_outcome(*row[5:10]) for row in group),
                tuple(row[8] for row in group),
                tuple(row[10] for row in group),
                batch_id,
                weight_version,
            )

    def _batches(self) -> list[tuple[StoredBatch, list[StoredGroup]]]:
        with self._view:  # all queries see the same snapshot
            self._view.execute("BEGIN")
            batches = sqlite_batches.read(self._view)
            groups: dict[str | None, list[StoredGroup]] = {}
            for group in self._groups("batch_id IS NOT NULL"):
                groups.setdefault(group.batch_id, []).append(group)
        return [(batch, groups.get(batch.request.id, [])) for batch in batches]

    def _newest(self) -> int:
        newest: int | None = self._view.execute("SELECT max(cursor) FROM results").fetchone()[0]
        return newest or 0

    def _results(self, after: int, limit: int, max_tokens: int, only: Selection) -> list[Result]:
        where, values = condition(only)
        with self._view:  # both queries see the same snapshot
            self._view.execute("BEGIN")
            if after > 0 and (dropped := newest_dropped(self._view, after, only)):
                raise CursorExpired(
                    f"results after {after}, up to {dropped}, are no longer kept",
                    hint="another reader has read them, or the store is in memory; 0 reads from the oldest "
                    "kept result",
                )
            # The sizes are read first, so that rows that do not fit into the page are not read.
            sizes = self._view.execute(
                f"SELECT cursor, tokens FROM results WHERE cursor > ?{where} ORDER BY cursor LIMIT ?",
                (after, *values, limit),
            ).fetchall()
            if not sizes:
                return []
            last = sizes[0][0]
            for cursor, tokens in sizes:
                max_tokens -= tokens
                if max_tokens < 0:
                    break
                last = cursor
            rows = self._view.execute(
                f"SELECT * FROM results WHERE cursor > ? AND cursor <= ?{where} ORDER BY cursor",
                (after, last, *values),
            ).fetchall()
        return [unpack(row) for row in rows]

    def _result(self, job_id: str) -> Result:
        group_id, sample = split_job_id(job_id)
        job = self._view.execute(
            "SELECT cursor FROM jobs JOIN groups USING (number) WHERE id = ? AND sample = ?",
            (group_id, sample),
        ).fetchone()
        if job is None:
            raise NotFound(f"no job {job_id!r}")
        if job[0] is None:
            raise NotFound(f"job {job_id!r} is not finished", hint="repeat the request when it is finished")
        row = self._view.execute("SELECT * FROM results WHERE cursor = ?", job).fetchone()
        if row is None:
            raise NotFound(f"the result of job {job_id!r} is no longer kept")
        return unpack(row)


class SqliteStore(SqlStore):
    """Store of groups and results in an SQLite file.

    Args:
        path: the file. A missing file is created, readable by its owner only. Its folder must exist.
        bounds: see `SqlStore`.

    Raises:
        InputError: the file cannot be opened, is not a store, has a newer format, or another service has it
            open.
    """

    errors = (sqlite3.Error,)

    def __init__(self, path: Path, **bounds: Any) -> None:
        self.path = path.resolve()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, lock(self.path))
            db = stack.enter_context(contextlib.closing(open_file(self.path)))
            view = stack.enter_context(contextlib.closing(open_file(self.path)))
            super().__init__(self.path.name, db, view, stack.pop_all(), **bounds)


class MemoryStore(SqlStore):
    """Store of groups and results in memory, which are lost when the process exits.

    Args:
        bounds: see `SqlStore`.
    """

    durable = False
    errors = (sqlite3.Error,)

    def __init__(self, **bounds: Any) -> None:
        db = open_in_memory()
        weakref.finalize(self, db.close)
        super().__init__("the store in memory", db, db, contextlib.ExitStack(), **bounds)


def steady_time() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that reads the wall clock only once, now. So later changes of the
    wall clock do not change the age of results."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


def _value_or_refusal(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except ProrlError as refusal:
        return refusal


def _same(known: bytes, text: bytes) -> bool:
    """Return True if two requests in JSON are equal. The order of keys does not matter."""
    return known == text or json.loads(known) == json.loads(text)


def _outcome(
    state: str | None, reward: float | None, failure: str | None, attempts: int, cursor: int | None
) -> StoredOutcome | None:
    if state is None or cursor is None:
        return None
    return StoredOutcome(JobState(state), reward, FailureKind(failure) if failure else None, attempts, cursor)
