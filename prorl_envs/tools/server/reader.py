"""Non-blocking readers of pipes and terminals."""

import os

from prorl_envs.tools.protocol.output import OutputBuffer
from prorl_envs.tools.server.loop import EventLoop

_SIZE = 65536
#: Maximum reads of a drain, so that it stops even if a writer does not. This is more than a terminal (64 KiB)
#: or a pipe (64 KiB, at most 1 MiB) can hold.
_DRAIN_READS = 300


class Leftovers:
    """Reader that discards output of background processes, because a closed pipe would kill them.

    Args:
        loop: watches the pipes.
        limit: maximum number of pipes; a further pipe closes the oldest.
    """

    def __init__(self, loop: EventLoop, limit: int = 64) -> None:
        self._loop = loop
        self._limit = limit
        self._fds: dict[int, None] = {}

    def adopt(self, fd: int) -> None:
        """Take over a non-blocking descriptor that is no longer watched."""
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
    """Reader that feeds a descriptor's data into a buffer until all writers have closed it.

    Args:
        loop: watches the descriptor.
        fd: the descriptor, which becomes non-blocking; its owner closes it.
        buffer: receives the data.
    """

    def __init__(self, loop: EventLoop, fd: int, buffer: OutputBuffer) -> None:
        self._loop = loop
        self._fd = fd
        self.buffer = buffer
        os.set_blocking(fd, False)
        self._loop.watch(fd, self._on_readable)

    def drain(self) -> bool:
        """Read all data written before now. Return True if all writers are known to have closed it.

        Reading until no data is left is sufficient, even for a terminal: the kernel delivers buffered data
        before it reports that there is no data.
        """
        for _ in range(_DRAIN_READS):
            try:
                data = os.read(self._fd, _SIZE)
            except OSError:  # would block; or a terminal's last user has closed it
                return False
            if not data:
                return True
            self.buffer.feed(data)
        return False

    def stop(self) -> None:
        """Stop watching."""
        self._loop.forget(self._fd)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._fd, _SIZE)
        except BlockingIOError:  # a terminal may be reported readable without having data
            return
        except OSError:  # EIO: a terminal's last user has closed it
            data = b""
        if data:
            self.buffer.feed(data)
        else:
            self.stop()
