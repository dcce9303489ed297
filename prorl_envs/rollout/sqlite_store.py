"""A store that outlives the process: SQL, committed by one thread; and one SQLite file as its database.

What is acknowledged is on the disk. Writes that wait while another is under way go to it together, in one
transaction, so the price of a flush is shared by everyone who waits for it. Reads have a connection and a
thread of their own and never wait for a write; who follows the results is given them from memory. A result is
written once; its token arrays are compressed machine numbers.

The file belongs on a local disk and to one service at a time. `docs/decisions/0009-durable-store.md` says
why it is so, and what happens when the disk is full. `postgres_store.py` has the other database.
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from prorl_envs.errors import FailureKind, ProrlError
from prorl_envs.rollout import sql_looking, sqlite_batches
from prorl_envs.rollout.batch_types import BatchTask
from prorl_envs.rollout.errors import NotFound, Unavailable
from prorl_envs.rollout.looking import Hits
from prorl_envs.rollout.sql_looking import Connection, condition
from prorl_envs.rollout.sqlite_file import deflate, lock, open_file, pack, unpack
from prorl_envs.rollout.store import (
    ALL,
    PAGE_TOKENS,
    NewGroup,
    Outcome,
    Recent,
    Selection,
    StoredBatch,
    StoredGroup,
    conflict,
    expired,
    first_page,
    token_count,
)
from prorl_envs.rollout.types import GroupRequest, JobState, Result, split_job_id
from prorl_envs.viewer.summary import Summary

#: Rows looked at together when the oldest results go: mostly one is over the bounds.
_TRIM_ROWS = 16
#: What a transaction may weigh, in tokens to be packed, to be carried out on the event loop: some 3 ms. A
#: submitted group weighs as much as so many.
_LIGHT, _GROUP_WEIGHT = 16_384, 1_024
#: Seconds that a write waits, at most, for another to go with, where nobody waits for it.
_COMPANY_S = 0.05


@dataclass(frozen=True, slots=True)
class _Write:
    """Something to be written: see `SqlStore._write`. Where nobody waits for it there is no future."""

    work: Callable[[], Any]
    future: asyncio.Future[Any] | None
    weight: float
    alone: bool


class SqlStore:
    """Groups and results in a database. Belongs to the event loop in which it is used; close it at the end.

    Args:
        name: what the database is called in errors.
        db: the connection that writes; `view`: the one that reads.
        held: closes both, and lets go of the database.
        max_results: results kept; the oldest go first, and a complete group goes with its last result.
        max_tokens: tokens of all trajectories kept.
        max_age_s: seconds that results are kept; None is no bound. Older ones go when a result comes.
        now: seconds since 1970; by default steady while the process runs, whatever the machine's clock does.

    Every method raises `Unavailable` where the database cannot be read or written; a write that raises has
    changed nothing.
    """

    durable = True
    #: What the connections raise where the database fails.
    errors: ClassVar[tuple[type[Exception], ...]]
    #: Whether a statement takes no longer than handing it to a thread.
    _near: ClassVar[bool]

    def __init__(
        self,
        name: str,
        db: Connection,
        view: Connection,
        held: contextlib.ExitStack,
        *,
        max_results: int = 100_000,
        max_tokens: int = 50_000_000,
        max_age_s: float | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._name = name
        self._db = db
        self._view = view
        self._held = held
        self._max_results = max_results
        self._max_tokens = max_tokens
        self._max_age_s = max_age_s
        self._now = now or steady_time()
        #: Of the newest result its cursor, and the tokens of all up to it; of the oldest its cursor, the
        #: tokens before it, and when it was recorded. None where it has to be asked for.
        self._last: tuple[int, int] | None = None
        self._oldest: tuple[int, int, float] | None = None
        #: Of the transaction under way: results recorded, the newest one dropped, whether others are to be.
        self._recorded: list[Result] = []
        self._dropped, self._drops_more = 0, False
        self._recent = Recent()
        self._waiting: list[_Write] = []
        self._left = False  # whether the last transaction left others waiting
        self._committing: asyncio.Future[None] | None = None  # done when nobody waits for a write
        self._company: asyncio.TimerHandle | None = None  # what waits without anybody goes alone then
        self._closed = False
        self._writer = ThreadPoolExecutor(1, "store-write")
        self._reader = ThreadPoolExecutor(1, "store-read")

    async def submit(self, groups: Sequence[NewGroup]) -> list[bool]:
        weight = len(groups) * _GROUP_WEIGHT
        return await self._write(partial(self._submit, groups), weight=weight, alone=True)

    async def started(self, job_id: str, failures: int = 0, *, at_once: bool = True) -> None:
        work = partial(self._started, job_id, failures)
        if at_once:
            await self._write(work, weight=0)
        else:
            self._write_with_others(work)

    async def record(self, result: Result) -> Result:
        return await self._write(partial(self._record, result), weight=token_count(result))

    async def group(self, group_id: str) -> StoredGroup:
        return await self._read(partial(self._group, group_id))

    async def newest(self) -> int:
        self._check_open()
        return self._recent.newest or await self._read(self._newest)

    async def results(
        self, after: int, limit: int, *, max_tokens: int = PAGE_TOKENS, only: Selection = ALL
    ) -> list[Result]:
        self._check_open()
        if (recent := self._recent.after(after)) is not None:
            return first_page((result for result in recent if result in only), limit, max_tokens)
        return await self._read(partial(self._results, after, limit, max_tokens, only))

    async def summaries(self, after: int, limit: int, *, only: Selection = ALL) -> list[Summary]:
        return await self._read(partial(sql_looking.summaries, self._view, after, limit, only))

    async def search(self, text: str, after: int, limit: int, *, only: Selection = ALL) -> Hits:
        return await self._read(partial(sql_looking.search, self._view, text, after, limit, only))

    async def result(self, job_id: str) -> Result:
        return await self._read(partial(self._result, job_id))

    async def unfinished(self) -> list[StoredGroup]:
        return await self._read(self._unfinished)

    async def open_batch(self, batch: StoredBatch) -> None:
        await self._write(partial(sqlite_batches.keep, self._db, batch))

    async def extend_batch(
        self, batch_id: str, first: int, tasks: Sequence[BatchTask], *, closed: bool
    ) -> None:
        await self._write(partial(sqlite_batches.extend, self._db, batch_id, first, tasks, closed=closed))

    async def cancel_batch(self, batch_id: str) -> int:
        return await self._write(partial(sqlite_batches.cancel, self._db, batch_id))

    async def drop_batch(self, batch_id: str) -> None:
        await self._write(partial(sqlite_batches.drop, self._db, batch_id))

    async def batches(self) -> list[tuple[StoredBatch, list[StoredGroup]]]:
        return await self._read(self._batches)

    async def keep(self, name: str, value: str) -> None:
        await self._write(partial(self._keep, name, value))

    async def kept(self, name: str) -> str | None:
        return await self._read(partial(self._kept, name))

    async def aclose(self) -> None:
        """Finish what was asked for and let go of the file. Idempotent."""
        self._closed = True
        if self._waiting:
            self._hurry()
        if self._committing is not None:
            await asyncio.wait([self._committing])
        for executor in (self._writer, self._reader):
            await asyncio.to_thread(executor.shutdown)
        await asyncio.to_thread(self._held.close)

    # Between the event loop and the threads.

    async def _write[T](self, work: Callable[[], T], *, weight: float = math.inf, alone: bool = False) -> T:
        """Have `work` done in the next transaction; return when that is on the disk. Who is cancelled while
        waiting does not know whether it was.

        Args:
            weight: see `_LIGHT`.
            alone: somebody waits for it, and not for results that would be recorded with it. Those are in the
                transaction after it, whatever comes.
        """
        self._check_open()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Write(work, future, weight, alone))
        self._hurry()
        return await future

    def _write_with_others(self, work: Callable[[], Any]) -> None:
        """Have light `work` done in a transaction that comes soon."""
        self._check_open()
        self._waiting.append(_Write(work, None, 0.0, alone=False))
        self._await_company()

    def _hurry(self) -> None:
        """See to it that what waits is written now, or next."""
        if self._company is not None:
            self._company.cancel()
            self._company = None
        if self._committing is None:
            self._committing = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(self._commit)  # with what others write until then

    def _await_company(self) -> None:
        if self._committing is None and self._company is None:
            self._company = asyncio.get_running_loop().call_later(_COMPANY_S, self._hurry)

    # Callbacks, not a task: each round of a busy loop that is saved is waited for by nobody.

    def _commit(self) -> None:
        """Write what waits."""
        loop = asyncio.get_running_loop()
        batch, self._waiting = self._waiting, []
        if not self._left and any(write.alone for write in batch):
            self._waiting = [write for write in batch if write.future is not None and not write.alone]
            batch = [write for write in batch if write.future is None or write.alone]
        self._left = bool(self._waiting)

        def tell(done: Future[list[Any]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(self._committed, [write.future for write in batch], done)

        works = [write.work for write in batch]
        run = partial(self._transaction, works)
        # Beside a busy loop a thread waits for the interpreter at the end of each statement, and makes the
        # loop wait as often: what is light is carried out here, and the thread does nothing but commit.
        if self._near and sum(write.weight for write in batch) <= _LIGHT:
            run = partial(self._end, self._begin(works))
        self._writer.submit(run).add_done_callback(tell)

    def _committed(self, waiting: Sequence[asyncio.Future[Any] | None], done: Future[list[Any]]) -> None:
        """Tell those whose writing is done, or has failed, and write what has come meanwhile."""
        error = done.exception()
        if error is None:
            self._recent.add(self._recorded, dropped=self._dropped)
        self._recorded.clear()
        for future, outcome in zip(
            waiting, done.result() if error is None else [error] * len(waiting), strict=True
        ):
            if future is None or future.done():  # nobody waits, or its caller was cancelled
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
                self._await_company()

    async def _read[T](self, work: Callable[[], T]) -> T:
        self._check_open()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, work)
        except self.errors as error:
            raise self._unavailable("read", error) from error

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed")

    def _unavailable(self, what: str, error: BaseException) -> Unavailable:
        hint = "what was accepted is safe; is the disk full, or the database in use or down?"
        return Unavailable(f"{self._name} cannot be {what}: {str(error).strip()}", hint=hint)

    # In the writing thread, or while it has nothing to do. What refuses does so before it writes, so the
    # others of its batch stand.

    def _transaction(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        return self._end(self._begin(works))

    def _begin(self, works: Sequence[Callable[[], Any]]) -> list[Any] | BaseException:
        """What came of each, or why the transaction has to be rolled back."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            return [_value_or_refusal(work) for work in works]
        except BaseException as error:  # noqa: BLE001 - raised by `_end`
            return error

    def _end(self, outcomes: list[Any] | BaseException) -> list[Any]:
        try:
            with self._db:  # commits, or rolls all of it back
                if isinstance(outcomes, BaseException):
                    raise outcomes
                while self._drops_more:
                    self._trim()
                return outcomes
        except BaseException:
            self._last = self._oldest = None
            self._drops_more = False
            raise

    def _submit(self, groups: Sequence[NewGroup]) -> list[bool]:
        new: dict[str, tuple[NewGroup, bytes]] = {}
        fresh = []
        for group in groups:
            request = group.request
            text = request.model_dump_json().encode()
            known = new[request.id][1] if request.id in new else self._request(request.id)
            if known is not None and not _same(known, text):
                raise conflict(request.id)
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
            # One statement: beside a busy event loop, each waits for the interpreter again.
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

    # Beside a busy event loop a statement waits for the interpreter at its end, and makes the loop wait:
    # what is known without one is not asked for.

    def _record(self, result: Result) -> Result:
        last, total = self._newest_known()
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
            return self._recorded_before(result)
        self._db.execute("UPDATE groups SET missing = missing - 1 WHERE number = ?", row)
        tokens = token_count(result)
        total += tokens
        values = (written.cursor, *row, tokens, total, *pack(written), self._now())
        self._db.execute("INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        self._last = written.cursor, total
        self._recorded.append(written)
        self._trim()
        return written

    def _recorded_before(self, result: Result) -> Result:
        row = self._db.execute(
            "SELECT cursor FROM jobs JOIN groups USING (number) WHERE id = ? AND sample = ?",
            (result.group_id, result.sample),
        ).fetchone()
        if row is None:
            raise NotFound(f"no group {result.group_id!r}")
        kept = self._db.execute("SELECT * FROM results WHERE cursor = ?", row).fetchone()
        return unpack(kept) if kept else result.model_copy(update={"cursor": row[0]})

    def _newest_known(self) -> tuple[int, int]:
        """The cursor of the newest result, and the tokens of all up to it."""
        if self._last is None:
            newest = self._db.execute("SELECT cursor, total FROM results ORDER BY cursor DESC LIMIT 1")
            self._last = newest.fetchone() or (0, 0)
        return self._last

    def _trim(self) -> None:
        """Drop some of the oldest results over the bounds; the newest always stays."""
        newest, total = self._newest_known()
        self._drops_more = False
        if self._oldest is not None and not self._is_over(*self._oldest, newest, total):
            return
        self._oldest = None
        oldest = self._db.execute(
            "SELECT cursor, total - tokens, at, number FROM results WHERE cursor < ?"
            f" ORDER BY cursor LIMIT {_TRIM_ROWS}",
            (newest,),
        ).fetchall()
        for cursor, before, at, number in oldest:
            if not self._is_over(cursor, before, at, newest, total):
                self._oldest = cursor, before, at
                return
            self._drop(cursor, number)
        self._drops_more = len(oldest) == _TRIM_ROWS

    def _is_over(self, cursor: int, before: int, at: float, newest: int, total: int) -> bool:
        """Whether a result is over the bounds: its cursor, the tokens before it, when it was recorded."""
        return (
            newest - cursor >= self._max_results
            or total - before > self._max_tokens
            or (self._max_age_s is not None and self._now() - at > self._max_age_s)
        )

    def _drop(self, cursor: int, number: int) -> None:
        self._db.execute("DELETE FROM results WHERE cursor = ?", (cursor,))
        self._dropped = cursor
        gone = self._db.execute(
            "DELETE FROM groups WHERE number = ? AND missing = 0 AND batch_id IS NULL"
            " AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.number = groups.number AND cursor > ?)",
            (number, cursor),
        )
        if gone.rowcount:
            self._db.execute("DELETE FROM jobs WHERE number = ?", (number,))

    def _keep(self, name: str, value: str) -> None:
        self._db.execute(
            "INSERT INTO kept VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, value),
        )

    # In the reading thread.

    def _kept(self, name: str) -> str | None:
        row = self._view.execute("SELECT value FROM kept WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else None

    def _group(self, group_id: str) -> StoredGroup:
        for group in self._groups("id = ?", group_id):
            return group
        raise NotFound(f"no group {group_id!r}")

    def _unfinished(self) -> list[StoredGroup]:
        return list(self._groups("missing > 0"))

    def _groups(self, condition: str, *values: object) -> Iterator[StoredGroup]:
        """Groups in the order of their submission. One query, so that each is of one moment."""
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
        with self._view:  # all queries see the same moment
            self._view.execute("BEGIN")
            kept = sqlite_batches.read(self._view)
            groups: dict[str | None, list[StoredGroup]] = {}
            for group in self._groups("batch_id IS NOT NULL"):
                groups.setdefault(group.batch_id, []).append(group)
        return [(batch, groups.get(batch.request.id, [])) for batch in kept]

    def _newest(self) -> int:
        newest: int | None = self._view.execute("SELECT max(cursor) FROM results").fetchone()[0]
        return newest or 0

    def _results(self, after: int, limit: int, max_tokens: int, only: Selection) -> list[Result]:
        where, values = condition(only)
        with self._view:  # both queries see the same moment
            self._view.execute("BEGIN")
            first = self._view.execute("SELECT min(cursor) FROM results").fetchone()[0]
            if first is not None and 0 < after < first - 1:
                raise expired(first - 1, after)
            # Sizes first: what a page cannot hold is not read.
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
            raise NotFound(f"job {job_id!r} is not finished", hint="ask again when it is")
        row = self._view.execute("SELECT * FROM results WHERE cursor = ?", job).fetchone()
        if row is None:
            raise NotFound(f"the result of job {job_id!r} is no longer kept")
        return unpack(row)


class SqliteStore(SqlStore):
    """Groups and results in a file.

    Args:
        path: the file; made, readable by its owner alone, where there is none. Its folder must exist.
        bounds: those of `SqlStore`.

    Raises:
        InputError: it cannot be opened, is no store, is of a newer version, or another service has it open.
    """

    errors = (sqlite3.Error,)
    _near = True

    def __init__(self, path: Path, **bounds: Any) -> None:
        self.path = path.resolve()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, lock(self.path))
            db = stack.enter_context(contextlib.closing(open_file(self.path)))
            view = stack.enter_context(contextlib.closing(open_file(self.path)))
            super().__init__(self.path.name, db, view, stack.pop_all(), **bounds)


def steady_time() -> Callable[[], float]:
    """Seconds since 1970, as they were when this was called and have passed since: no step of the machine's
    clock makes results old."""
    begin = time.time() - time.monotonic()
    return lambda: begin + time.monotonic()


def _value_or_refusal(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except ProrlError as refusal:
        return refusal


def _same(known: bytes, text: bytes) -> bool:
    """Whether two requests ask for the same, in whatever order."""
    return known == text or json.loads(known) == json.loads(text)


def _outcome(
    state: str | None, reward: float | None, failure: str | None, attempts: int, cursor: int | None
) -> Outcome | None:
    if state is None or cursor is None:
        return None
    return Outcome(JobState(state), reward, FailureKind(failure) if failure else None, attempts, cursor)
