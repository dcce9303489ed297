"""Store in a PostgreSQL database: executes the statements of `SqlStore` with PostgreSQL.

The store belongs to one service at a time, which holds an advisory lock of the database while its session
lasts. If the session breaks, the service opens another session, unless another service has opened the
database meanwhile. To detect this, each service increments `owner.epoch` when it opens the database. For the
reasons see `docs/decisions/store.md`.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from prorl_envs.errors import InputError
from prorl_envs.extras import install_extras
from prorl_envs.rollout.store.sql import SqlStore
from prorl_envs.rollout.store.tables import FORMAT, TABLES, check_format

try:
    import psycopg
except ImportError as error:  # pragma: no cover - the extra is not installed
    raise InputError("psycopg is not installed", hint=install_extras("postgres")) from error

SCHEMA = "prorl_envs"
#: Key of the advisory lock: "PROL".
_LOCK = 0x50524F4C
#: Connection timeout, and pause between two tries to lock or to query a transaction's state, in seconds.
_CONNECT_S, _PAUSE_S = 10, 0.2
#: Seconds to wait for the lock of a service that has just stopped.
_LOCK_S = 3.0
#: Options of sessions. With these keep-alive times, a failed host loses the lock after a minute. By default
#: it would keep the lock for two hours, and no other service could take over.
_OPTIONS = (
    f"-c search_path={SCHEMA} -c synchronous_commit=on -c idle_in_transaction_session_timeout=0"
    " -c tcp_keepalives_idle=30 -c tcp_keepalives_interval=10 -c tcp_keepalives_count=3"
)

_TYPES = {
    "counter": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "name": 'TEXT COLLATE "C"',
    "bytes": "BYTEA",
    "integer": "BIGINT",
    "real": "DOUBLE PRECISION",
    "clustered": "",
}
#: The values are compressed already.
_TABLES = f"""
CREATE TABLE owner (epoch BIGINT NOT NULL, format INTEGER NOT NULL);
INSERT INTO owner VALUES (0, {FORMAT});
{TABLES.format(**_TYPES)}
ALTER TABLE results ALTER body SET STORAGE EXTERNAL, ALTER ids SET STORAGE EXTERNAL,
    ALTER loss_mask SET STORAGE EXTERNAL, ALTER logprobs SET STORAGE EXTERNAL;
"""


class PostgresStore(SqlStore):
    """Store of groups and results in a PostgreSQL database. Its tables are in the schema `prorl_envs`.

    Args:
        url: `postgresql://...`, see https://www.postgresql.org/docs/current/libpq-connect.html.
        bounds: see `SqlStore`.

    Raises:
        InputError: the database cannot be opened, has another format, or another service has it open.
    """

    errors = (psycopg.Error,)

    def __init__(self, url: str, **bounds: Any) -> None:
        name = _name(url)
        self._stopping = threading.Event()
        with contextlib.ExitStack() as stack:
            try:
                owner = stack.enter_context(contextlib.closing(_Owner(url, name, self._stopping)))
                view = stack.enter_context(contextlib.closing(_View(url)))
            except psycopg.Error as error:
                raise InputError(f"the store {name} cannot be opened: {str(error).strip()}") from error
            super().__init__(name, owner, view, stack.pop_all(), **bounds)

    async def aclose(self) -> None:
        """Finish pending writes and release the database. Idempotent."""
        self._stopping.set()
        await super().aclose()


def open_to_read(url: str) -> tuple[str, "_View"]:
    """Return the database's name, and a connection to it that takes no lock and writes nothing.

    Raises:
        InputError: the database cannot be read, or contains no store.
    """
    name = _name(url)
    try:
        with contextlib.ExitStack() as stack:
            view = _View(url)
            stack.callback(view.close)
            [owner_table] = view.execute("SELECT to_regclass(?)", (f"{SCHEMA}.owner",)).fetchone() or (None,)
            if owner_table is None:
                raise InputError(f"{name} contains no store", hint="prorl-envs serve --store creates one")
            _check_format(view.session())
            stack.pop_all()
            return name, view
    except psycopg.Error as error:
        raise InputError(f"the store {name} cannot be read: {str(error).strip()}") from error


class _Session:
    """Connection with the interface of `sqlite3.Connection`, which is reopened after a failure."""

    begin = "BEGIN"

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: psycopg.Connection[Any] | None = None
        self._in_transaction = False  # if True, a broken session is not replaced: the transaction is lost
        self.session()

    def session(self) -> psycopg.Connection[Any]:
        """Return the open connection."""
        if self._session is None or (self._session.closed and not self._in_transaction):
            self._session = None
            session = _connect(self._url)
            try:
                self.opened(session)
            except BaseException:
                session.close()
                raise
            self._session = session
        return self._session

    def opened(self, session: psycopg.Connection[Any]) -> None:
        """Prepare a new session. Subclasses override this method."""

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> psycopg.Cursor[Any]:
        text = sql.replace("?", "%s")
        if sql.startswith("BEGIN"):
            text, self._in_transaction = self.begin, False
        rows = self.session().execute(text.encode(), _plain(parameters) or None)
        self._in_transaction |= text == self.begin
        return rows

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object:
        with self.session().cursor() as cursor:
            cursor.executemany(sql.replace("?", "%s").encode(), [_plain(row) for row in parameters])
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        try:
            if kind is None:
                self.commit()
            elif self._session is not None:
                with contextlib.suppress(psycopg.Error):  # the server itself rolls back a broken session
                    self._session.execute("ROLLBACK")
        finally:
            self._in_transaction = False

    def commit(self) -> None:
        self.session().execute("COMMIT")

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


class _View(_Session):
    """Session that only reads. All reads of one transaction see the same snapshot."""

    begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


class _Owner(_Session):
    """Session that writes and holds the lock.

    Args:
        url: URL of the database.
        name: name of the database in errors.
        stopping: set when the store closes; ends all waits.
    """

    def __init__(self, url: str, name: str, stopping: threading.Event) -> None:
        self._name = name
        self._stopping = stopping
        self._epoch: int | None = None
        self._transaction = ""
        super().__init__(url)

    def opened(self, session: psycopg.Connection[Any]) -> None:
        locked = _lock(session)
        if self._epoch is None:  # the server may not have noticed yet that the last service stopped
            deadline = time.monotonic() + _LOCK_S
            while not locked and time.monotonic() < deadline and not self._stopping.wait(_PAUSE_S):
                locked = _lock(session)
        if not locked and self._epoch is None:
            hint = "each service needs its own database"
            raise InputError(f"the store {self._name} is open in another service", hint=hint)
        if not locked:  # it may be our own broken session, which the server has not closed yet
            raise psycopg.OperationalError("another session holds the lock of the store")
        if self._epoch is None:
            self._epoch = _prepare(session)
        elif session.execute("SELECT epoch FROM owner").fetchone() != (self._epoch,):
            raise psycopg.OperationalError(
                "another service had the database meanwhile: restart this service, and run only one at a time"
            )

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> psycopg.Cursor[Any]:
        rows = super().execute(sql, parameters)
        if sql.startswith("BEGIN"):
            [self._transaction] = super().execute("SELECT pg_current_xact_id()::text").fetchone() or ("",)
        return rows

    def commit(self) -> None:
        """Commit the transaction. If the session breaks before the response, query the transaction's state:
        writers must not receive an error for a stored write, nor success for a lost write."""
        try:
            super().commit()
        except psycopg.OperationalError:
            if not self._was_committed():
                raise

    def _was_committed(self) -> bool:
        while True:
            try:
                with _connect(self._url) as session:
                    rows = session.execute("SELECT pg_xact_status(%s::xid8)", (self._transaction,))
                    [status] = rows.fetchone() or ("",)
                if status != "in progress":
                    return bool(status == "committed")
            except psycopg.Error:
                if self._stopping.is_set():  # after the next start, the service reads the stored state
                    raise
            self._stopping.wait(_PAUSE_S)


def _lock(session: psycopg.Connection[Any]) -> bool:
    [locked] = session.execute("SELECT pg_try_advisory_lock(%s)", (_LOCK,)).fetchone() or (False,)
    return bool(locked)


def _connect(url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(url, autocommit=True, connect_timeout=_CONNECT_S, options=_OPTIONS)


def _prepare(session: psycopg.Connection[Any]) -> int:
    """Create the tables if there are none, increment the epoch, and return it."""
    with session.transaction():
        [owner_table] = session.execute("SELECT to_regclass(%s)", (f"{SCHEMA}.owner",)).fetchone() or (None,)
        if owner_table is None:
            session.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}".encode())
            session.execute(_TABLES.encode())
        _check_format(session)
        [epoch] = session.execute("UPDATE owner SET epoch = epoch + 1 RETURNING epoch").fetchone() or (0,)
        return int(epoch)


def _check_format(session: psycopg.Connection[Any]) -> None:
    [version] = session.execute("SELECT format FROM owner").fetchone() or (0,)
    check_format(version)


def _plain(parameters: Sequence[Any]) -> tuple[Any, ...]:
    # PostgreSQL text cannot contain NUL. No id contains NUL, so this replacement affects no lookup by id.
    return tuple(
        value.encode(errors="replace").decode().replace("\0", "\ufffd") if isinstance(value, str) else value
        for value in parameters
    )


def _name(url: str) -> str:
    """Return the database's name for messages, without the password."""
    try:
        parts = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.Error as error:
        raise InputError(f"the store's URL is invalid: {str(error).strip()}") from error
    host = parts.get("host") or "local"
    return f"{parts.get('dbname') or 'postgres'} at {host}"
