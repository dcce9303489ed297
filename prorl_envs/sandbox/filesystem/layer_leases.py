"""Leases of layers: a store never evicts a layer while a process holds a lease of it.

A store has `layers/KEY/` and beside it `leases/KEY`. A lease is a shared lock (flock) of that file. The
kernel releases it if the holder is killed. The file's time is that of the layer's last use. NFS passes these
locks on to other nodes. On a file system without locks only the last use protects a layer.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

LAYERS, LEASES = "layers", "leases"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def open_locked(path: Path, operation: int) -> int | None:
    """Open a file (creating it if necessary) and lock it.

    Args:
        operation: operation of `fcntl.flock`.

    Returns:
        The descriptor; None if the file is locked elsewhere and the operation does not wait.

    Raises:
        OSError: the file cannot be opened.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            _lock(fd, operation)
            if _is_at(fd, path):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # removed between the two calls: lock its successor


def _lock(fd: int, operation: int) -> None:
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


class LayerLease:
    """Lease of layers, until `release`. Directories outside a store need no lease and are skipped.

    A store that this user may not write has no leases either: its owner has to keep layers long enough.

    Args:
        layers: directories of layers, such as those of a `LayeredImage`.
    """

    def __init__(self, layers: Iterable[Path]) -> None:
        self.layers = tuple(layers)
        self._locks: list[int] = []
        try:
            for layer in self.layers:
                self._take(layer)
        except BaseException:
            self.release()
            raise

    def _take(self, layer: Path) -> None:
        leases = layer.parent.with_name(LEASES)
        if layer.parent.name != LAYERS or not leases.is_dir():
            return
        with contextlib.suppress(PermissionError):
            lock = open_locked(leases / layer.name, fcntl.LOCK_SH)
            if lock is not None:
                self._locks.append(lock)
                os.utime(lock)

    def release(self) -> None:
        """Release the lease. Idempotent."""
        while self._locks:
            os.close(self._locks.pop())
