"""Lock of a key between processes, by flock, which NFS passes on to other nodes.

The guarded operations are correct even without the lock, on a file system without locks: a build has a unique
name and is published by one rename. The same image is then only built twice.
"""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from prorl_envs.images.threads import in_thread
from prorl_envs.sandbox.filesystem.layer_leases import open_locked

_POLL_S = 0.5


@asynccontextmanager
async def key_lock(path: Path, *, on_wait: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
    """Hold the lock at `path`, a file in an existing directory. The kernel releases a killed owner's lock.

    Args:
        on_wait: called once if another owner holds the lock.
    """
    held, waits = list[int](), False

    def take() -> bool:
        lock = open_locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is not None:
            held.append(lock)  # not returned, because a cancellation of the call would lose it
        return lock is not None

    try:
        while not await in_thread(take):
            if not waits:
                on_wait()
            waits = True
            await asyncio.sleep(_POLL_S)
        yield
    finally:
        if held:
            await in_thread(_release, path, held.pop())


def _release(path: Path, lock: int) -> None:
    try:
        path.unlink(missing_ok=True)
    finally:
        os.close(lock)
