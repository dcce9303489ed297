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
from prorl_envs.rollout.api.types import Result, upgrade_result
from prorl_envs.rollout.store.summaries import ARRAYS, body_of

#: Number in the file's header that distinguishes stores from databases of other programs.
_APPLICATION_ID = 0x50524F4C
#: Seconds that a statement waits if another program writes to the file, which no program should do. The event
#: loop may be blocked for this time.
_BUSY_S = 0.25

# Each step upgrades a file from the previous format; a new file takes all steps. Released steps are never
# changed; changes are further steps.
#
# `results.total` is the number of tokens of all results ever recorded, up to and including this row. So the
# number of tokens in a range of rows is a difference of two totals.
_FORMAT_1 = f"""
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, task_id TEXT NOT NULL, request BLOB NOT NULL,
    missing INTEGER NOT NULL
);
CREATE INDEX unfinished ON groups (number) WHERE missing > 0;
CREATE TABLE jobs (
    number INTEGER, sample INTEGER, attempts INTEGER NOT NULL DEFAULT 0,
    cursor INTEGER, state TEXT, reward REAL, failure TEXT,
    PRIMARY KEY (number, sample)
) WITHOUT ROWID;
CREATE TABLE results (
    cursor INTEGER PRIMARY KEY, number INTEGER NOT NULL, tokens INTEGER NOT NULL, total INTEGER NOT NULL,
    body BLOB NOT NULL, ids BLOB, loss_mask BLOB, logprobs BLOB
);
PRAGMA application_id = {_APPLICATION_ID};
"""
#: Columns for the filters of readers, and the number of failed attempts of a job.
_FORMAT_2 = """
ALTER TABLE groups ADD COLUMN environment TEXT NOT NULL DEFAULT '';
UPDATE groups SET environment = environment_of(request);
ALTER TABLE jobs ADD COLUMN failures INTEGER NOT NULL DEFAULT 0;
"""
#: Time at which a result was recorded, in seconds since 1970.
_FORMAT_3 = """
ALTER TABLE results ADD COLUMN at REAL;
UPDATE results SET at = strftime('%s', 'now');
"""
#: Batches, and the groups that count for them.
_FORMAT_4 = """
ALTER TABLE groups ADD COLUMN batch_id TEXT;
ALTER TABLE groups ADD COLUMN weight_version INTEGER;
CREATE INDEX of_a_batch ON groups (batch_id) WHERE batch_id IS NOT NULL;
CREATE TABLE batches (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, request BLOB NOT NULL, tenant TEXT NOT NULL,
    carried TEXT NOT NULL, dropped INTEGER NOT NULL, closed INTEGER NOT NULL, cancelled_at INTEGER
);
CREATE TABLE batch_tasks (
    number INTEGER, position INTEGER, body BLOB NOT NULL, PRIMARY KEY (number, position)
) WITHOUT ROWID;
"""
#: State that a restarted service needs.
_FORMAT_5 = """
CREATE TABLE kept (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
#: New names of fields in batch requests.
_FORMAT_6 = """
UPDATE batches SET request = rename_batch_fields(request);
"""
#: `read_results`: results that a reader has acknowledged; all others are unread, also those of earlier
#: formats. `dropped_results`: dropped results, so that readers get an error instead of a gap. A row without a
#: group stands for all results up to its cursor.
_FORMAT_7 = """
CREATE TABLE read_results (cursor INTEGER PRIMARY KEY, tokens INTEGER NOT NULL);
CREATE TABLE dropped_results (cursor INTEGER PRIMARY KEY, group_id TEXT, environment TEXT, state TEXT);
INSERT INTO dropped_results (cursor) SELECT min(cursor) - 1 FROM results HAVING min(cursor) > 1;
"""
FORMATS = (_FORMAT_1, _FORMAT_2, _FORMAT_3, _FORMAT_4, _FORMAT_5, _FORMAT_6, _FORMAT_7)
SCHEMA_VERSION = len(FORMATS)

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
        InputError: the file cannot be opened, is not a store, or has a newer format.
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
    _upgrade(db, 0)
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
            _version(db)
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


def _version(db: sqlite3.Connection) -> int:
    """Return the format of a store; 0 if the file is empty.

    Raises:
        InputError: the file belongs to another program, or has a newer format.
    """

    def pragma(name: str) -> int:
        return int(db.execute(f"PRAGMA {name}").fetchone()[0])

    if db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0:
        return 0
    if pragma("application_id") != _APPLICATION_ID:
        raise InputError("the file is a database of another program", hint="use another file")
    version = pragma("user_version")
    if not 1 <= version <= SCHEMA_VERSION:
        hint = "open it with the version that wrote it, or use a new file"
        raise InputError(
            f"the store has format {version}; this version reads 1 to {SCHEMA_VERSION}", hint=hint
        )
    return version


def _prepare(db: sqlite3.Connection) -> None:
    version = _version(db)
    if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise InputError("the file system of the store supports no shared memory", hint="use a local disk")
    db.execute("PRAGMA synchronous = FULL")
    _upgrade(db, version)


def _upgrade(db: sqlite3.Connection, version: int) -> None:
    """Upgrade the tables from a format to the newest format."""
    if version < SCHEMA_VERSION:
        db.create_function("environment_of", 1, _environment_of, deterministic=True)
        db.create_function("rename_batch_fields", 1, rename_batch_fields, deterministic=True)
        steps = "".join(FORMATS[version:])
        db.executescript(f"BEGIN; {steps} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")


def _environment_of(request: bytes) -> str:
    return str(json.loads(zlib.decompress(request))["environment"])


def rename_batch_fields(request: bytes) -> bytes:
    """Return a stored batch request of an earlier format with the current names of its fields."""
    names = {
        "usable": "min_rewards",
        "spare": "max_speculative_groups",
        "leftover": "on_complete",
        "more": "stream_open",
    }
    fields = json.loads(zlib.decompress(request))
    return deflate(json.dumps({names.get(name, name): fields[name] for name in fields}).encode())


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
    if fields["version"] == 1:
        fields = upgrade_result(fields)
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
