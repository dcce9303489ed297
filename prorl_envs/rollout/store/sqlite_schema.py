"""SQLite file of a durable store: opening, tables, and conversion of results to rows."""

import contextlib
import fcntl
import json
import os
import sqlite3
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.summary import ARRAYS, body_of
from prorl_envs.rollout.api.types import Result

#: Number in the file's header that distinguishes stores from databases of other programs.
_APPLICATION_ID = 0x50524F4C
#: Seconds that a statement waits if another program writes to the file, which no program should do. The event
#: loop may be blocked for this time.
_BUSY_S = 0.25

#: Format of the tables. A store of another format is refused.
SCHEMA_VERSION = 7
# - results.total: number of tokens of all results ever recorded, up to and including this row. So the number
#   of tokens in a range of rows is a difference of two totals.
# - results.at: time of the recording, in seconds since 1970.
# - kept: state that a restarted service needs.
# - read_results: results that a reader has acknowledged; all others are unread.
# - dropped_results: dropped results, so that readers get an error instead of a gap. A row without a group
#   stands for all results up to its cursor.
_TABLES = f"""
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, task_id TEXT NOT NULL, request BLOB NOT NULL,
    missing INTEGER NOT NULL, environment TEXT NOT NULL DEFAULT '', batch_id TEXT, weight_version INTEGER
);
CREATE INDEX unfinished ON groups (number) WHERE missing > 0;
CREATE INDEX of_a_batch ON groups (batch_id) WHERE batch_id IS NOT NULL;
CREATE TABLE jobs (
    number INTEGER, sample INTEGER, attempts INTEGER NOT NULL DEFAULT 0,
    cursor INTEGER, state TEXT, reward REAL, failure TEXT, failures INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (number, sample)
) WITHOUT ROWID;
CREATE TABLE results (
    cursor INTEGER PRIMARY KEY, number INTEGER NOT NULL, tokens INTEGER NOT NULL, total INTEGER NOT NULL,
    body BLOB NOT NULL, ids BLOB, loss_mask BLOB, logprobs BLOB, at REAL
);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, request BLOB NOT NULL, tenant TEXT NOT NULL,
    carried TEXT NOT NULL, dropped INTEGER NOT NULL, closed INTEGER NOT NULL, cancelled_at INTEGER
);
CREATE TABLE batch_tasks (
    number INTEGER, position INTEGER, body BLOB NOT NULL, PRIMARY KEY (number, position)
) WITHOUT ROWID;
CREATE TABLE kept (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE read_results (cursor INTEGER PRIMARY KEY, tokens INTEGER NOT NULL);
CREATE TABLE dropped_results (cursor INTEGER PRIMARY KEY, group_id TEXT, environment TEXT, state TEXT);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""

#: File systems that several machines may mount, without the shared memory that SQLite needs between readers.
_OF_SEVERAL_MACHINES = frozenset(
    {"nfs", "nfs4", "lustre", "cifs", "smb3", "beegfs", "gpfs", "ceph", "glusterfs", "juicefs", "sshfs"}
)

_STORE_HINT = "--store, or service.store: a file on a local disk, a PostgreSQL database, or memory"


def lock(path: Path) -> int:
    """Lock a store, and return the descriptor that holds the lock. The kernel releases the lock when the
    process exits, for whatever reason.

    The lock is on a file beside the store: closing a descriptor of the store would release SQLite's locks.

    Raises:
        InputError: the store is locked by another service, or cannot be locked.
    """
    beside = path.with_name(path.name + "-lock")
    if kind := _shared_by_machines(path.parent):
        raise InputError(f"the store {path} is on {kind}, where SQLite is not safe", hint=_STORE_HINT)
    try:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputError(f"the store {path} cannot be opened: {error.strerror}", hint=_STORE_HINT) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        hint = "each service needs its own file"
        raise InputError(f"the store {path} is open in another service", hint=hint) from error
    except OSError as error:
        os.close(descriptor)
        raise InputError(f"the store {path} cannot be locked: {error.strerror}", hint=_STORE_HINT) from error
    return descriptor


def _shared_by_machines(folder: Path) -> str:
    """Return the type of a folder's file system if several machines may share it, otherwise ""."""
    try:
        device, mounts = (
            folder.stat().st_dev,
            Path("/proc/self/mountinfo").read_bytes().decode(errors="replace"),
        )
    except OSError:  # the folder is missing; opening the store will report this
        return ""
    kind = type_of(device, mounts)
    return kind if kind.removeprefix("fuse.") in _OF_SEVERAL_MACHINES else ""


def type_of(device: int, mounts: str) -> str:
    """Return the type of the file system on a device; "" if unknown.

    Args:
        device: device number, as in `os.stat_result.st_dev`.
        mounts: content of `/proc/self/mountinfo`, see proc_pid_mountinfo(5).
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.split("\n"):
        mount, _, source = line.partition(" - ")
        if number in mount.split(" "):
            return source.partition(" ")[0]
    return ""


def open_file(path: Path) -> sqlite3.Connection:
    """Open the store at `path`. The caller must hold its lock. A missing or empty file becomes a store.

    Raises:
        InputError: the file cannot be opened, is not a store, or has another format.
    """
    try:
        path.touch(mode=0o600)
        with contextlib.ExitStack() as stack:
            db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            stack.callback(db.close)
            _prepare(db)
            stack.pop_all()
            return db
    except (OSError, sqlite3.Error) as error:
        raise InputError(f"the store {path} cannot be opened: {error}") from error


def open_in_memory() -> sqlite3.Connection:
    """Open a new store in memory."""
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _create_tables(db)
    return db


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open a store that a service may have open. Writes nothing and does not take the store's lock.

    Raises:
        InputError: the file cannot be read, or is not a store.
    """
    try:
        with contextlib.ExitStack() as stack:
            db = _connect_to_read(path, "mode=ro")
            stack.callback(db.close)
            _is_store(db)
            stack.pop_all()
            return db
    except (OSError, sqlite3.Error) as error:
        raise InputError(f"the store {path} cannot be read: {error}") from error


def _connect_to_read(path: Path, mode: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, check_same_thread=False)
    try:
        db.execute("SELECT count(*) FROM sqlite_schema")
    except sqlite3.OperationalError:
        db.close()
        # In a read-only folder, SQLite cannot create the shared memory of its readers. If there is no pending
        # write-ahead log, no service is writing, and the file can be read without shared memory.
        write_ahead_log = path.with_name(path.name + "-wal")
        if mode == "mode=ro" and not (write_ahead_log.exists() and write_ahead_log.stat().st_size):
            return _connect_to_read(path, "immutable=1")
        raise
    return db


def _is_store(db: sqlite3.Connection) -> bool:
    """Return whether a file is a store; False if it is empty.

    Raises:
        InputError: the file belongs to another program, or has another format.
    """

    def pragma(name: str) -> int:
        return int(db.execute(f"PRAGMA {name}").fetchone()[0])

    if db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0:
        return False
    if pragma("application_id") != _APPLICATION_ID:
        raise InputError("the file is a database of another program", hint="use another file")
    if (version := pragma("user_version")) != SCHEMA_VERSION:
        hint = "open it with the version that wrote it, or use a new file"
        raise InputError(f"the store has format {version}; this version reads {SCHEMA_VERSION}", hint=hint)
    return True


def _prepare(db: sqlite3.Connection) -> None:
    exists = _is_store(db)
    if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise InputError("the file system of the store supports no shared memory", hint="use a local disk")
    db.execute("PRAGMA synchronous = FULL")
    if not exists:
        _create_tables(db)


def _create_tables(db: sqlite3.Connection) -> None:
    db.executescript(f"BEGIN; {_TABLES} COMMIT;")


def pack(result: Result) -> tuple[bytes | None, ...]:
    """Return the columns `body`, `ids`, `loss_mask` and `logprobs` of a result. `body` omits the arrays."""
    body, trajectory = deflate(body_of(result)), result.trajectory
    if trajectory is None:
        return (body, None, None, None)
    return (
        body,
        _pack_integers(trajectory.ids),
        _pack_integers(trajectory.loss_mask),
        _pack_reals(trajectory.logprobs),
    )


def deflate(data: bytes) -> bytes:
    """Compress data quickly; `zlib.decompress` reads the result."""
    return zlib.compress(data, 1)


def unpack(row: Sequence[Any]) -> Result:
    """Return the result in a row of the table `results`, with all columns."""
    cursor, _, _, _, body, *columns, _ = row
    fields = json.loads(zlib.decompress(body))
    if fields["trajectory"] is not None:
        fields["trajectory"] |= dict(zip(ARRAYS, map(_unpack_numbers, columns), strict=True))
    return Result.model_validate({**fields, "cursor": cursor})


def _pack_integers(values: Sequence[int]) -> bytes:
    """Pack integers as the smallest machine type that fits all of them, compressed."""
    for code in "BHIq":
        with contextlib.suppress(OverflowError):  # the next type is wider
            return _deflate_array(array(code, values))
    raise OverflowError("a number of more than 64 bits")


def _pack_reals(values: list[float]) -> bytes:
    """Pack numbers, compressed, in single precision if this is exact for all, otherwise in double."""
    single = array("f", values)
    return _deflate_array(single if single.tolist() == values else array("d", values))


def _deflate_array(numbers: "array[Any]") -> bytes:
    return deflate(numbers.typecode.encode() + numbers.tobytes())


def _unpack_numbers(packed: bytes) -> list[Any]:
    content = zlib.decompress(packed)
    return array(chr(content[0]), content[1:]).tolist()
