"""SQLite database with a thread that writes and a thread that reads.

A write returns when it is on the disk. Writes that arrive during a transaction are committed together in the
next transaction, so they share the cost of a flush. Reads have their own connection, and never wait for a
write.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Concatenate

from prorl_envs.errors import ProrlError
from prorl_envs.rollout.api.errors import Unavailable

#: Seconds for which a write without a waiting caller waits for other writes, to share their transaction, and
#: seconds before it is tried again after its transaction failed.
_JOIN_S, _RETRY_S = 0.05, 1.0
#: Seconds after a failed write for which the database counts as not writable.
_FAILURE_S = 30.0

log = logging.getLogger(__name__)


def writes[D: "Database", **P, T](
    method: Callable[Concatenate[D, P], T],
) -> Callable[Concatenate[D, P], Coroutine[Any, Any, T]]:
    """Run a method in the next transaction of the writing thread. The returned coroutine finishes once the
    transaction is on the disk. The method must raise a `ProrlError` before it writes, since the other writes
    of the transaction remain valid."""

    @wraps(method)
    async def write(self: D, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._write(partial(method, self, *args, **kwargs))

    return write


def reads[D: "Database", **P, T](
    method: Callable[Concatenate[D, P], T],
) -> Callable[Concatenate[D, P], Coroutine[Any, Any, T]]:
    """Run a method in the reading thread."""

    @wraps(method)
    async def read(self: D, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._read(partial(method, self, *args, **kwargs))

    return read


@dataclass(frozen=True, slots=True)
class _Write:
    """Pending write, see `Database._write`. `future` is None if no caller waits."""

    work: Callable[[], Any]
    future: asyncio.Future[Any] | None


class Database:
    """Connections of a database and their threads. It must be used in one event loop, and must be closed.

    Args:
        name: name of the database in errors.
        db: connection that writes; `view`: connection that reads, which may be `db`.
        resources: closes both connections and releases the database.
    """

    def __init__(
        self,
        name: str,
        db: sqlite3.Connection,
        view: sqlite3.Connection,
        resources: contextlib.ExitStack,
    ) -> None:
        self._name = name
        self._db = db
        self._view = view
        self._resources = resources
        self._waiting: list[_Write] = []
        self._committing: asyncio.Future[None] | None = None  # done when no caller waits for a write
        self._timer: asyncio.TimerHandle | None = None  # start of a transaction that no caller waits for
        #: Time of the last failed write; None if a later write succeeded.
        self._failed_at: float | None = None
        self._closed = False
        self._writer = ThreadPoolExecutor(1, "store-write")
        self._reader = self._writer if view is db else ThreadPoolExecutor(1, "store-read")

    # Subclasses override these methods, to change their own state with the database.

    def _before_commit(self) -> None:
        """Finish a transaction. Runs in the writing thread."""

    def _after_commit(self) -> None:
        """Apply the state of a committed transaction. Runs in the event loop, before any caller continues."""

    def _rolled_back(self) -> None:
        """Discard the state of a failed transaction. Runs in the writing thread."""

    async def aclose(self) -> None:
        """Finish pending writes and release the database. Idempotent."""
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

    async def _read[T](self, work: Callable[[], T]) -> T:
        self._check_open()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, work)
        except sqlite3.Error as error:
            raise self._unavailable("read", error) from error

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed")

    def _unavailable(self, action: str, error: BaseException) -> Unavailable:
        hint = "accepted jobs are not lost; is the disk full, or the file locked?"
        return Unavailable(f"{self._name} cannot be {action}: {str(error).strip()}", hint=hint)

    # Transactions, by callbacks: a task would need more iterations of a busy event loop.

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

    def _commit(self) -> None:
        """Start a transaction with the waiting writes."""
        loop = asyncio.get_running_loop()
        batch, self._waiting = self._waiting, []

        def notify_loop(done: Future[list[Any]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
                loop.call_soon_threadsafe(self._committed, batch, done)

        works = [write.work for write in batch]
        self._writer.submit(self._transaction, works).add_done_callback(notify_loop)

    def _transaction(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run `works` in a transaction, in the writing thread. Return their outcomes."""
        try:
            with self._db:  # commits, or rolls back if an error is raised
                self._db.execute("BEGIN IMMEDIATE")
                outcomes = [_value_or_refusal(work) for work in works]
                self._before_commit()
        except BaseException:
            self._rolled_back()
            raise
        return outcomes

    def _committed(self, batch: Sequence[_Write], done: Future[list[Any]]) -> None:
        """Resolve the futures of a finished transaction, and start the next one if writes are waiting."""
        error = done.exception()
        if error is None:
            self._after_commit()
        elif isinstance(error, sqlite3.Error) and not self._closed:
            self._waiting[:0] = [write for write in batch if write.future is None]
        self._note_outcome(error)
        for write, outcome in zip(
            batch, done.result() if error is None else [error] * len(batch), strict=True
        ):
            future = write.future
            if future is None or future.done():  # no caller waits, or the caller was cancelled
                continue
            if isinstance(outcome, sqlite3.Error):
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
        if isinstance(error, sqlite3.Error):
            if self._failed_at is None:
                log.error("%s. Writes of accepted jobs are tried again.", self._unavailable("written", error))
            self._failed_at = time.monotonic()
        elif error is None and self._failed_at is not None:
            self._failed_at = None
            log.warning("%s can be written again", self._name)


def _value_or_refusal(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except ProrlError as refusal:
        return refusal
