"""Lock file between nodes, on whose file system `flock` may be missing or affect only one node.

The owner acquires the lock with a hard link (atomic on NFS and Lustre) to a file with its identity, and keeps
it by a heartbeat: it updates the file's time. The guarded operations are correct even without the lock: a
build has a unique name and is published by one rename. If two owners hold the lock (one was suspended and
considered dead), the same image is only built twice. So another owner may take over the lock safely.
"""

import asyncio
import contextlib
import errno
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.images.threads import in_thread

BEAT_S = 15.0
#: Seconds without a heartbeat after which an owner on another node counts as dead. NFS can report a
#: file's time up to a minute late.
STALE_S = 180.0
_POLL_S = 0.5
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class LockPlace(msgspec.Struct, frozen=True):
    """Scope in which a pid is unique: a host since its last boot, and a pid namespace."""

    host: str
    boot: str
    pids: str


class Owner(msgspec.Struct, frozen=True):
    """Owner of a lock.

    Args:
        started: start time of the process in clock ticks after the host's boot; distinguishes the process
            from a later one with the same pid.
        token: unique text, also among the locks of one process.
    """

    place: LockPlace
    pid: int
    started: str
    token: str


def here() -> LockPlace:
    """Return the scope of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return LockPlace(socket.gethostname(), boot, str(Path("/proc/self/ns/pid").readlink()))


def abandoned(
    owner: Owner | None, place: LockPlace, started: Callable[[int], str], unchanged_s: float, stale_s: float
) -> bool:
    """Return True if a lock's owner counts as dead.

    Args:
        owner: the owner; None if the file does not name it.
        place: scope of the caller.
        started: returns the start time of the process with a pid here; empty if there is none.
        unchanged_s: seconds without a heartbeat while the caller watched the lock, by its own clock (the
            clocks of two nodes are never compared).
        stale_s: seconds without a heartbeat after which an owner elsewhere counts as dead.
    """
    if owner is not None and owner.place == place:
        return started(owner.pid) != owner.started
    return unchanged_s >= stale_s


def process_started(pid: int) -> str:
    """Return a process's start time in clock ticks after the host's boot; empty if it is dead or absent."""
    try:
        # The name in the second field may contain any characters, including brackets and spaces.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


class KeyLock:
    """Lock at `path`, for one `async with`.

    Args:
        path: the lock file; its directory must exist.
        on_wait: called once, with the owner, if another owner holds the lock.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_wait: Callable[[Owner | None], None] = lambda owner: None,
        clock: Clock | None = None,
        stale_s: float = STALE_S,
    ) -> None:
        self._path = path
        self._on_wait = on_wait
        self._clock = clock or SystemClock()
        self._stale_s = stale_s
        self._owner = Owner(here(), os.getpid(), process_started(os.getpid()), secrets.token_hex(8))
        self._heartbeat: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._acquire()
        except BaseException:
            # After a cancellation, the file may exist: it would name a living process for ever.
            await in_thread(self._remove_if_owned, self._owner)
            raise
        self._heartbeat = asyncio.create_task(self._beat())
        return self

    async def _acquire(self) -> None:
        waiting: tuple[Owner | None, int] | None = None
        since = self._clock.monotonic()
        while not await in_thread(self._take):
            current = await in_thread(read_lock, self._path)
            if current is None:
                continue
            now = self._clock.monotonic()
            if waiting is None:
                self._on_wait(current[0])
            if current != waiting:
                waiting, since = current, now
            if abandoned(current[0], self._owner.place, process_started, now - since, self._stale_s):
                await in_thread(self._remove_if_owned, current[0])
            else:
                await self._clock.sleep(_POLL_S)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.wait([self._heartbeat])
        await in_thread(self._remove_if_owned, self._owner)

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep(BEAT_S)
            with contextlib.suppress(OSError):  # another owner took over, or the file server is unreachable
                await in_thread(os.utime, self._path)

    def _take(self) -> bool:
        draft = self._path.with_name(f"{self._path.name}.{self._owner.token}")
        try:
            draft.write_bytes(msgspec.json.encode(self._owner))
            try:
                self._path.hardlink_to(draft)
            except FileExistsError:
                # NFS may have lost the response to a successful link: then the draft has two names.
                return draft.stat().st_nlink == 2
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._create()
            return True
        finally:
            draft.unlink(missing_ok=True)

    def _create(self) -> bool:
        """Create the lock on a file system without hard links. The file names its owner a moment later."""
        try:
            with self._path.open("xb") as file:
                file.write(msgspec.json.encode(self._owner))
        except FileExistsError:
            return False
        return True

    def _remove_if_owned(self, owner: Owner | None) -> None:
        """Remove the lock if it still belongs to `owner`."""
        aside = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        try:
            found = read_lock(aside)
            if found is not None and found[0] != owner:
                # Another owner has it meanwhile: restore the file, unless the lock was acquired again.
                with contextlib.suppress(OSError):
                    self._path.hardlink_to(aside)
        finally:
            aside.unlink(missing_ok=True)


def read_lock(path: Path) -> tuple[Owner | None, int] | None:
    """Return a lock's owner and last heartbeat (in ns, by the file server); None if the lock is free."""
    try:
        with path.open("rb") as file:
            text, beat = file.read(4096), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(text, type=Owner), beat
    except msgspec.DecodeError:
        return None if not text and not path.exists() else (None, beat)
