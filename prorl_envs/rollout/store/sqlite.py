"""SQLite databases of a store: in a file, which belongs to one service at a time, and in memory.

For the reasons, and for the behaviour with a full disk, see `docs/decisions/store.md`.
"""

import contextlib
import fcntl
import os
import sqlite3
import weakref
from pathlib import Path
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.rollout.store.sql import SqlStore
from prorl_envs.rollout.store.tables import FORMAT, TABLES, check_format

#: Number in the file's header that distinguishes stores from databases of other programs.
_APPLICATION_ID = 0x50524F4C
#: Seconds that a statement waits if another program writes to the file, which no program should do. The event
#: loop may be blocked for this time.
_BUSY_S = 0.25

#: File systems that several machines may mount, without the memory that SQLite's connections share.
_OF_SEVERAL_MACHINES = frozenset(
    {"nfs", "nfs4", "lustre", "cifs", "smb3", "beegfs", "gpfs", "ceph", "glusterfs", "juicefs", "sshfs"}
)

#: Mount options, and a type, of such file systems whose locks do not hold on other machines.
_LOCAL_LOCKS = frozenset({"localflock", "nolock", "local_lock=all", "local_lock=flock", "nobrl", "sshfs"})

_STORE_HINT = "--store, or service.store: a file, or memory"


class SqliteStore(SqlStore):
    """Store of groups and results in an SQLite file.

    Args:
        path: the file. A missing file is created, readable by its owner only. Its folder must exist. On a
            file system that several machines mount, there is one connection, and no other program can read
            the file meanwhile.
        bounds: see `SqlStore`.

    Raises:
        InputError: the file cannot be opened, is not a store, has another format, or another service has it
            open.
    """

    def __init__(self, path: Path, **bounds: Any) -> None:
        self.path = path.resolve()
        shared = _shared(self.path.parent)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, lock(self.path))
            db = stack.enter_context(contextlib.closing(open_file(self.path, alone=shared)))
            view = db if shared else stack.enter_context(contextlib.closing(open_file(self.path)))
            super().__init__(self.path.name, db, view, stack.pop_all(), **bounds)


class MemoryStore(SqlStore):
    """Store of groups and results in memory, which are lost when the process exits.

    Args:
        bounds: see `SqlStore`.
    """

    durable = False

    def __init__(self, **bounds: Any) -> None:
        db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        _create_tables(db)
        weakref.finalize(self, db.close)
        super().__init__("the store in memory", db, db, contextlib.ExitStack(), **bounds)


def lock(path: Path) -> int:
    """Lock a store, and return the descriptor that holds the lock. The kernel releases the lock when the
    process exits, for whatever reason.

    The lock is on a file beside the store: closing a descriptor of the store would release SQLite's locks.

    Raises:
        InputError: the store is locked by another service, or cannot be locked.
    """
    beside = path.with_name(path.name + "-lock")
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


def _shared(folder: Path) -> bool:
    """Return whether several machines may share a folder's file system.

    Raises:
        InputError: they may, but a lock holds on one of them only.
    """
    try:
        device, mounts = folder.stat().st_dev, Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:  # the folder is missing; opening the store will report this
        return False
    kind, options = mount_of(device, mounts)
    kind = kind.removeprefix("fuse.")
    shared = kind in _OF_SEVERAL_MACHINES
    if shared and (local := _LOCAL_LOCKS & {*options, kind}):
        raise InputError(
            f"{folder} is on {kind}, whose locks hold on one machine only ({min(local)})",
            hint="put the store on a local disk, so that no second machine can open it",
        )
    return shared


def mount_of(device: int, mounts: str) -> tuple[str, set[str]]:
    """Return the type and the options of the file system on a device; empty if unknown.

    Args:
        device: device number, as in `os.stat_result.st_dev`.
        mounts: content of `/proc/self/mountinfo`, see proc_pid_mountinfo(5).
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.split("\n"):
        mount, _, source = line.partition(" - ")
        if number in mount.split(" "):
            kind, _, options = source.split(" ")
            return kind, {*options.split(","), *mount.split(" ")[5].split(",")}
    return "", set()


def open_file(path: Path, *, alone: bool = False) -> sqlite3.Connection:
    """Open the store at `path`. The caller must hold its lock. A missing or empty file becomes a store.

    Args:
        path: the file.
        alone: admit no other connection, and so need no shared memory (https://sqlite.org/wal.html#noshm).

    Raises:
        InputError: the file cannot be opened, is not a store, or has another format.
    """
    try:
        path.touch(mode=0o600)
        with contextlib.ExitStack() as stack:
            db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            stack.callback(db.close)
            if alone:
                db.execute("PRAGMA locking_mode = EXCLUSIVE")
            _prepare(db)
            stack.pop_all()
            return db
    except (OSError, sqlite3.Error) as error:
        raise InputError(f"the store {path} cannot be opened: {error}") from error


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open a store that a service may have open. Writes nothing and does not take the store's lock.

    Raises:
        InputError: the file cannot be read, is not a store, or is open on a file system of several machines.
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
    check_format(pragma("user_version"))
    return True


def _prepare(db: sqlite3.Connection) -> None:
    exists = _is_store(db)
    if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise InputError("the file system of the store supports no shared memory", hint="use a local disk")
    db.execute("PRAGMA synchronous = FULL")
    if not exists:
        _create_tables(db)


def _create_tables(db: sqlite3.Connection) -> None:
    marks = f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {FORMAT};"
    db.executescript(f"BEGIN; {TABLES} {marks} COMMIT;")
