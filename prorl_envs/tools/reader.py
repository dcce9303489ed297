"""Collects what arrives on a pipe or terminal, without ever waiting for it."""

import os

from prorl_envs.tools.loop import Loop
from prorl_envs.tools.output import OutputBuffer

_SIZE = 65536
# More than a terminal (64 KiB) or a pipe (64 KiB, at most 1 MiB) can hold, so a writer that never stops
# cannot keep a drain from ending.
_DRAIN_READS = 300


class Leftovers:
    """Reads and forgets what background processes go on writing, so that a closed pipe ends none of them.

    Args:
        limit: pipes read at a time; beyond that the oldest is closed.
    """

    def __init__(self, loop: Loop, limit: int = 64) -> None:
        self._loop = loop
        self._limit = limit
        self._fds: dict[int, None] = {}

    def adopt(self, fd: int) -> None:
        """Take over a non-blocking descriptor that nobody watches any more."""
        if len(self._fds) >= self._limit:
            self._drop(next(iter(self._fds)))
        self._fds[fd] = None
        self._loop.watch(fd, lambda: self._on_readable(fd))

    def close(self) -> None:
        for fd in tuple(self._fds):
            self._drop(fd)

    def _on_readable(self, fd: int) -> None:
        if not os.read(fd, _SIZE):
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        del self._fds[fd]
        self._loop.forget(fd)
        os.close(fd)


class OutputReader:
    """Feeds a descriptor's data into a buffer until the writers have gone.

    Args:
        loop: watches the descriptor.
        fd: set non-blocking here; stays its owner's.
        buffer: where the data goes.
    """

    def __init__(self, loop: Loop, fd: int, buffer: OutputBuffer) -> None:
        self._loop = loop
        self._fd = fd
        self._buffer = buffer
        os.set_blocking(fd, False)
        self.start()

    def start(self) -> None:
        """Watch, again after a `stop`."""
        self._loop.watch(self._fd, self._on_readable)

    def drain(self) -> bool:
        """Read all that was written before now. Returns whether the writers have gone, as far as is known.

        Reading until nothing is left is enough, for a terminal too: before the kernel says so, it delivers
        what is still on its way.
        """
        for _ in range(_DRAIN_READS):
            try:
                data = os.read(self._fd, _SIZE)
            except OSError:  # would block; or a terminal that its last user has left
                return False
            if not data:
                return True
            self._buffer.feed(data)
        return False

    def stop(self) -> None:
        """Watch no more."""
        self._loop.forget(self._fd)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._fd, _SIZE)
        except BlockingIOError:  # a terminal may seem readable and yet have nothing
            return
        except OSError:  # EIO: a terminal that its last user has left
            data = b""
        if data:
            self._buffer.feed(data)
        else:
            self.stop()
