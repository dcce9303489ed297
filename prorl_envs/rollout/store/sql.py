"""Store of groups, results and batches: its SQL statements.

`tables.py` describes the tables, `database.py` runs the methods that are marked `writes` and `reads` in its
threads, and `sqlite.py` opens the database. Clients that follow the results receive them
from memory.
"""

import contextlib
import itertools
import json
import math
import sqlite3
import zlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from pydantic import TypeAdapter

from prorl_envs.errors import FailureKind, InputError
from prorl_envs.model.types import Sampled
from prorl_envs.rollout.agent.token_ledger import answers_of
from prorl_envs.rollout.api.batches import BatchRequest, BatchTask
from prorl_envs.rollout.api.dashboard import SearchPage
from prorl_envs.rollout.api.errors import Conflict, CursorExpired, NotFound
from prorl_envs.rollout.api.summary import Summary, holds, needles, summary_of_body
from prorl_envs.rollout.api.types import ALL, GroupRequest, JobState, Result, Selection, job_id, split_job_id
from prorl_envs.rollout.api.views import JobView
from prorl_envs.rollout.store.base import (
    KNOWN_DROPPED,
    PAGE_TOKENS,
    NewGroup,
    Recent,
    StoredBatch,
    StoredGroup,
    UnreadResults,
    first_page,
    token_count,
)
from prorl_envs.rollout.store.database import Database, reads, writes
from prorl_envs.rollout.store.tables import (
    RESULT,
    WITHOUT_RESULTS,
    bodies,
    condition,
    deflate,
    one_of,
    pack,
    unpack,
)

#: Rows per query when the oldest results are dropped; usually one result exceeds the limits. Maximum number
#: of such queries in one transaction: 50,000 drops take 5 s, and other writes wait for them.
_TRIM_ROWS, _MAX_TRIMS = 16, 64
#: Value of `SqlStore._oldest` if no result was read: cursor and tokens that never exceed a limit.
_NOTHING_READ = (math.inf, math.inf)
#: Number of drops after which the oldest rows of `dropped_results` are removed. A row takes some 60 bytes.
_FORGET_EVERY = 1_000
#: Maximum number of acknowledged results in one statement.
_ACKNOWLEDGED_AT_ONCE = 500
#: Approximate maximum of bytes that one step of a search reads.
STEP = 16 << 20


_ANSWER = TypeAdapter(Sampled)


class _JobId(msgspec.Struct):
    job_id: str


_JOB_ID = msgspec.json.Decoder(_JobId)


class SqlStore(Database):
    """Store of groups and results in an SQL database.

    Results are dropped, oldest first, if there are more than `max_results` results or `max_tokens` tokens. A
    durable store drops only results that were read. A complete group is dropped with its last result.

    Every method raises `Unavailable` if the database cannot be used. A failed write changes nothing.

    Args:
        name, db, view, resources: see `Database`.
        max_results, max_tokens: number of results to keep, and of tokens in all of them together.
    """

    #: True if the data outlives the process.
    durable = True

    def __init__(
        self,
        name: str,
        db: sqlite3.Connection,
        view: sqlite3.Connection,
        resources: contextlib.ExitStack,
        *,
        max_results: int = 100_000,
        max_tokens: int = 50_000_000,
    ) -> None:
        super().__init__(name, db, view, resources)
        self._max_results = max_results
        self._max_tokens = max_tokens
        #: Cursor of the newest result, and number of tokens of all results up to it. None if unknown.
        self._last: tuple[int, int] | None = None
        #: Oldest result that may be dropped: cursor, and number of tokens before it. None if unknown.
        self._oldest: tuple[float, float] | None = None
        #: State of the transaction: recorded results, change of `unread`, whether results are left to drop.
        self._recorded: list[Result] = []
        self._unread_change = UnreadResults()
        self._more_to_drop = False
        #: Greatest cursor of a dropped result, and number of dropped results.
        self._dropped, self._drops = 0, 0
        self._recent = Recent()
        try:
            self._unread = self._count_unread()
        except sqlite3.Error as error:
            resources.close()
            raise InputError(f"the store {name} cannot be read: {str(error).strip()}") from error

    # Groups and jobs.

    @writes
    def submit(self, groups: Sequence[NewGroup]) -> list[bool]:
        """Store all of these groups, or none of them.

        Returns:
            For each group, True if it is new; False if the same request is stored already.

        Raises:
            Conflict: an id is stored with another request, or occurs in `groups` with different requests.
        """
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
            [number] = self._db.execute(
                "INSERT INTO groups (id, task_id, environment, request, missing, batch_id, weight_version)"
                " VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING number",
                (
                    group.request.id,
                    group.task_id,
                    group.request.environment,
                    deflate(text),
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

    async def started(self, job_id: str, attempts: int, failures: int, *, at_once: bool = True) -> None:
        """Store the number of attempts of a job, of which one starts now.

        Args:
            failures: number of earlier attempts that failed. The other earlier attempts were interrupted.
            at_once: return once the attempt is stored. Otherwise it is stored soon, with the next write. If
                the service is killed before that, the attempt is not counted.

        Raises:
            NotFound: no such job.
        """
        work = partial(self._started, job_id, attempts, failures)
        if at_once:
            await self._write(work)
        else:
            self._write_with_others(work)

    def _started(self, job_id: str, attempts: int, failures: int) -> None:
        changed = self._db.execute(
            "UPDATE jobs SET attempts = ?, failures = ?"
            " WHERE number = (SELECT number FROM groups WHERE id = ?) AND sample = ?",
            (attempts, failures, *split_job_id(job_id)),
        )
        if changed.rowcount == 0:
            raise NotFound(f"no job {job_id!r}")

    def note_turn(self, job_id: str, history: bytes, answer: Sampled) -> None:
        """Store a sampled answer of an unfinished job soon, with the next write, until the job's result is
        recorded. See `TurnJournal`."""
        self._write_with_others(partial(self._note_turn, job_id, history, answer))

    def _note_turn(self, job_id: str, history: bytes, answer: Sampled) -> None:
        self._db.execute(
            "INSERT INTO turns SELECT number, sample, ?, ? FROM groups JOIN jobs USING (number)"
            " WHERE id = ? AND sample = ? AND cursor IS NULL ON CONFLICT DO NOTHING",
            (history, deflate(_ANSWER.dump_json(answer)), *split_job_id(job_id)),
        )

    @reads
    def turns(self, job_id: str) -> dict[bytes, Sampled]:
        """Return the sampled answers of a job by their histories, see `note_turn`. Those of a finished job
        are in its result: there are none if that is dropped or has several rows."""
        rows = self._view.execute(
            "SELECT history, answer FROM turns JOIN groups USING (number) WHERE id = ? AND sample = ?",
            split_job_id(job_id),
        ).fetchall()
        if rows:
            return {bytes(key): _ANSWER.validate_json(zlib.decompress(answer)) for key, answer in rows}
        with contextlib.suppress(NotFound):
            result = self._result(job_id)
            if result.trajectory is not None and not result.forks:
                return answers_of(result.trajectory)
        return {}

    @reads
    def group(self, group_id: str) -> StoredGroup:
        """Return a group. Raises NotFound if there is no such group."""
        for group in self._groups("id = ?", group_id):
            return group
        raise NotFound(f"no group {group_id!r}")

    @reads
    def unfinished(self) -> list[StoredGroup]:
        """Return the incomplete groups, oldest first. A restarted service resumes them."""
        return list(self._groups("missing > 0"))

    def _groups(self, condition: str, *values: object) -> Iterator[StoredGroup]:
        """Yield groups in the order of their submission. A single query reads them from one snapshot."""
        rows = self._view.execute(
            "SELECT number, task_id, request, batch_id, weight_version,"
            " sample, state, attempts, reward, failure, cursor, failures"
            f" FROM groups JOIN jobs USING (number) WHERE {condition} ORDER BY number, sample",
            values,
        ).fetchall()
        for _, jobs in itertools.groupby(rows, key=lambda row: row[0]):
            group = list(jobs)
            _, task_id, packed, batch_id, weight_version, *_ = group[0]
            request = GroupRequest.model_validate_json(zlib.decompress(packed))
            yield StoredGroup(
                request,
                task_id,
                tuple(_job(request.id, *row[5:-1]) for row in group),
                tuple(row[-1] for row in group),
                batch_id,
                weight_version,
            )

    # Results.

    @writes
    def record(self, result: Result) -> Result:
        """Store the result of a job and assign its cursor. If the job has a result already, nothing is stored
        and that result is returned. Concurrent calls return in the order of the cursors.

        Raises:
            NotFound: the job's group is not stored.
        """
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
        self._db.execute("DELETE FROM turns WHERE number = ? AND sample = ?", (*row, result.sample))
        tokens = token_count(result)
        total += tokens
        self._db.execute(
            "INSERT INTO results (cursor, number, tokens, total, body, ids, loss_mask, logprobs)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (written.cursor, *row, tokens, total, *pack(written)),
        )
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
        stored = self._db.execute(f"SELECT {RESULT} FROM results WHERE cursor = ?", row).fetchone()
        return unpack(stored) if stored else result.model_copy(update={"cursor": row[0]})

    def _last_result(self) -> tuple[int, int]:
        """Return the cursor of the newest result, and the number of tokens of all results up to it. The value
        is cached, since each statement waits for the interpreter lock."""
        if self._last is None:
            newest = self._db.execute("SELECT cursor, total FROM results ORDER BY cursor DESC LIMIT 1")
            self._last = newest.fetchone() or (0, 0)
        return self._last

    @reads
    def result(self, job_id: str) -> Result:
        """Return the result of a job. Raises NotFound for unknown and unfinished jobs and dropped results."""
        return self._result(job_id)

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
        row = self._view.execute(f"SELECT {RESULT} FROM results WHERE cursor = ?", job).fetchone()
        if row is None:
            raise NotFound(f"the result of job {job_id!r} is no longer kept")
        return unpack(row)

    async def newest(self) -> int:
        """Return the greatest cursor; 0 if there is no result."""
        self._check_open()
        return self._recent.newest or await self._newest()

    @reads
    def _newest(self) -> int:
        newest: int | None = self._view.execute("SELECT max(cursor) FROM results").fetchone()[0]
        return newest or 0

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
        return await self._results(after, limit, max_tokens, only)

    @reads
    def _results(self, after: int, limit: int, max_tokens: int, only: Selection) -> list[Result]:
        where, values = condition(only)
        with self._view:  # both queries see the same snapshot
            self._view.execute("BEGIN")
            if after > 0 and (dropped := self._newest_dropped(after, only)):
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
                f"SELECT {RESULT} FROM results WHERE cursor > ? AND cursor <= ?{where} ORDER BY cursor",
                (after, last, *values),
            ).fetchall()
        return [unpack(row) for row in rows]

    def _newest_dropped(self, after: int, only: Selection) -> int:
        """Return the greatest cursor after `after` of a dropped result that `only` may accept, or 0."""
        conditions: list[str] = ["TRUE"]
        values: list[Any] = [after]
        columns = {"group_id": only.groups, "environment": only.environments, "state": only.states}
        conditions += [one_of(column, accepted, values) for column, accepted in columns.items() if accepted]
        if only.prefix:
            conditions.append("substr(group_id, 1, length(?)) = ?")
            values += [only.prefix, only.prefix]
        newest: int | None = self._view.execute(
            "SELECT max(cursor) FROM dropped_results"
            f" WHERE cursor > ? AND (group_id IS NULL OR {' AND '.join(conditions)})",
            values,
        ).fetchone()[0]
        return newest or 0

    @reads
    def summaries(self, after: int, limit: int, *, only: Selection = ALL) -> list[Summary]:
        """Return summaries of results, with the arguments of `results`. Never raises CursorExpired."""
        return [
            summary_of_body(body, cursor, tokens)
            for cursor, tokens, body in bodies(self._view, after, limit, only)
        ]

    @reads
    def search(self, text: str, after: int, limit: int, *, only: Selection = ALL) -> SearchPage:
        """Run one step of a text search, over at most `limit` results after the cursor `after`. A result is a
        hit if one of its strings contains the text."""
        patterns, jobs, searched_bytes = needles(text), [], 0
        for cursor, _, body in bodies(self._view, after, limit, only):
            after, searched_bytes = cursor, searched_bytes + len(body)
            if holds(body, patterns):
                jobs.append(_JOB_ID.decode(body).job_id)
            if searched_bytes >= STEP:
                break
        return SearchPage(jobs=jobs, next=after)

    # Read results, and results to drop.

    @property
    def unread(self) -> UnreadResults:
        """Number of unread results."""
        return self._unread

    def _count_unread(self) -> UnreadResults:
        results, tokens = self._view.execute(
            "SELECT count(*), coalesce(sum(tokens), 0) FROM results"
            " WHERE cursor NOT IN (SELECT cursor FROM read_results)"
        ).fetchone()
        return UnreadResults(results, int(tokens))

    @reads
    def cursors(self, after: int, up_to: int, only: Selection = ALL, *, unread: bool = False) -> list[int]:
        """Return the cursors of the stored results after `after`, up to and including `up_to`. With `unread`,
        return only cursors of unread results."""
        where, values = condition(only)
        if unread:
            where += " AND cursor NOT IN (SELECT cursor FROM read_results)"
        rows = self._view.execute(
            f"SELECT cursor FROM results WHERE cursor > ? AND cursor <= ?{where} ORDER BY cursor",
            (after, up_to, *values),
        )
        return [cursor for [cursor] in rows.fetchall()]

    def acknowledge(self, cursors: Collection[int]) -> None:
        """Mark results as read, so that they may be dropped. A durable store drops only read results.

        The marks are stored soon, with the next write. If the service is killed before that, the results stay
        unread. Cursors without a stored result are ignored.
        """
        if cursors:
            self._write_with_others(partial(self._acknowledge, tuple(cursors)))

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
            f"SELECT cursor, total - results.tokens, number FROM {droppable}"
            f" ORDER BY cursor LIMIT {_TRIM_ROWS}"
        ).fetchall()
        for cursor, before, number in oldest:
            if not self._exceeds(cursor, before, newest, total):
                self._oldest = cursor, before
                return
            self._drop(cursor, number)
        self._more_to_drop = len(oldest) == _TRIM_ROWS
        if self.durable and not self._more_to_drop:
            self._oldest = _NOTHING_READ

    def _exceeds(self, cursor: float, before: float, newest: int, total: int) -> bool:
        """Return True if a result exceeds the limits. `before`: number of tokens of all results before it;
        `newest`: cursor of the newest result; `total`: tokens of all results."""
        return cursor < newest and (newest - cursor >= self._max_results or total - before > self._max_tokens)

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

    def _before_commit(self) -> None:
        for _ in range(_MAX_TRIMS):  # later transactions drop the remaining results
            if not self._more_to_drop:
                break
            self._trim()

    def _after_commit(self) -> None:
        self._unread += self._unread_change
        self._unread_change = UnreadResults()
        self._recent.add(self._recorded, dropped=self._dropped)
        self._recorded.clear()

    def _rolled_back(self) -> None:
        self._last = self._oldest = None
        self._more_to_drop = False
        self._unread_change = UnreadResults()
        self._recorded.clear()

    # Batches.

    @writes
    def open_batch(self, batch: StoredBatch) -> None:
        """Store a new batch, whose id is unused, and assign its carried groups to it.

        Raises:
            Conflict: the id of a stored group has the form of the batch's group ids, `<id>/<index>`.
        """
        db, request = self._db, batch.request
        # ":" follows "9" in ASCII, so this range of the index has all ids of the form `<id>/<index>`.
        candidates = db.execute(
            "SELECT id FROM groups WHERE id >= ? AND id < ?", (f"{request.id}/0", f"{request.id}/:")
        )
        if any(split_job_id(row[0])[0] == request.id for row in candidates.fetchall()):
            raise Conflict(
                f"there is a group {request.id}/<index> already", hint="use a new id for the batch"
            )
        unset = _unset_fields(request) | {
            "tasks": {i: _unset_fields(task) for i, task in enumerate(request.tasks)}
        }
        body = deflate(request.model_dump_json(exclude=unset).encode())
        db.execute(
            "INSERT INTO batches (id, request, tenant, carried, dropped, closed) VALUES (?, ?, ?, ?, ?, ?)",
            (request.id, body, batch.tenant, json.dumps(batch.carried), batch.dropped, int(batch.closed)),
        )
        db.executemany(
            "UPDATE groups SET batch_id = ? WHERE id = ?", ((request.id, group) for group in batch.carried)
        )

    @writes
    def extend_batch(self, batch_id: str, first: int, tasks: Sequence[BatchTask], *, closed: bool) -> None:
        """Append tasks to a batch's stream, the first of them at the index `first`."""
        [number] = self._db.execute("SELECT number FROM batches WHERE id = ?", (batch_id,)).fetchone()
        rows = [
            (number, position, deflate(task.model_dump_json(exclude=_unset_fields(task)).encode()))
            for position, task in enumerate(tasks, first)
        ]
        self._db.executemany("INSERT INTO batch_tasks (number, position, body) VALUES (?, ?, ?)", rows)
        self._db.execute("UPDATE batches SET closed = ? WHERE number = ?", (int(closed), number))

    @writes
    def cancel_batch(self, batch_id: str) -> int:
        """Mark a batch as cancelled. Returns the cursor of the newest result at that time."""
        newest: int = self._db.execute("SELECT coalesce(max(cursor), 0) FROM results").fetchone()[0]
        self._db.execute("UPDATE batches SET cancelled_at = ? WHERE id = ?", (newest, batch_id))
        return newest

    @writes
    def drop_batch(self, batch_id: str) -> None:
        """Delete a batch, and those of its groups that have no stored results any more."""
        db = self._db
        [number] = db.execute("SELECT number FROM batches WHERE id = ?", (batch_id,)).fetchone()
        db.execute("DELETE FROM batch_tasks WHERE number = ?", (number,))
        db.execute("DELETE FROM batches WHERE number = ?", (number,))
        dropped_groups = db.execute(
            f"SELECT number FROM groups WHERE batch_id = ? AND missing = 0 AND {WITHOUT_RESULTS}", (batch_id,)
        ).fetchall()
        db.executemany("DELETE FROM jobs WHERE number = ?", dropped_groups)
        db.executemany("DELETE FROM groups WHERE number = ?", dropped_groups)
        db.execute("UPDATE groups SET batch_id = NULL WHERE batch_id = ?", (batch_id,))

    @reads
    def batches(self) -> list[tuple[StoredBatch, list[StoredGroup]]]:
        """Return every batch with its groups, oldest first. A batch's groups are stored as long as the batch,
        even if their results are dropped."""
        with self._view:  # all queries see the same snapshot
            self._view.execute("BEGIN")
            batches = [
                self._batch(*row)
                for row in self._view.execute(
                    "SELECT number, request, tenant, carried, dropped, closed, cancelled_at"
                    " FROM batches ORDER BY number"
                ).fetchall()
            ]
            groups: dict[str | None, list[StoredGroup]] = {}
            for group in self._groups("batch_id IS NOT NULL"):
                groups.setdefault(group.batch_id, []).append(group)
        return [(batch, groups.get(batch.request.id, [])) for batch in batches]

    def _batch(
        self,
        number: int,
        request: bytes,
        tenant: str,
        carried: str,
        dropped: int,
        closed: int,
        cancelled_at: int | None,
    ) -> StoredBatch:
        tasks = self._view.execute(
            "SELECT body FROM batch_tasks WHERE number = ? ORDER BY position", (number,)
        )
        return StoredBatch(
            BatchRequest.model_validate_json(zlib.decompress(request)),
            tenant,
            tuple(json.loads(carried)),
            dropped,
            tuple(BatchTask.model_validate_json(zlib.decompress(body)) for [body] in tasks),
            bool(closed),
            cancelled_at,
        )

    # Values of other parts of the service.

    @writes
    def put_value(self, name: str, value: str) -> None:
        """Store a value under a name, in place of the previous value, for a restarted service."""
        self._db.execute(
            "INSERT INTO kept VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, value),
        )

    @reads
    def get_value(self, name: str) -> str | None:
        """Return the value stored under a name, or None."""
        row = self._view.execute("SELECT value FROM kept WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else None


def _same(known: bytes, text: bytes) -> bool:
    """Return True if two requests in JSON are equal. The order of keys does not matter."""
    return known == text or json.loads(known) == json.loads(text)


def _job(
    group_id: str,
    sample: int,
    state: str | None,
    attempts: int,
    reward: float | None,
    failure: str | None,
    cursor: int | None,
) -> JobView:
    return JobView(
        id=job_id(group_id, sample),
        group_id=group_id,
        sample=sample,
        state=JobState(state) if state else JobState.QUEUED,
        attempts=attempts,
        reward=reward,
        failure=FailureKind(failure) if failure else None,
        cursor=cursor,
    )


def _unset_fields(row: BatchRequest | BatchTask) -> dict[str, Any]:
    """Return the fields of `sampling` and `limits` that the request did not set. They are not stored, so that
    the environment's defaults still apply to them."""
    parts = {"sampling": row.sampling, "limits": row.limits}
    return {
        name: set(type(part).model_fields) - part.model_fields_set
        for name, part in parts.items()
        if part is not None
    }
