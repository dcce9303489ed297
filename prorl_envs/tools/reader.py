"""Collects what arrives on a pipe or terminal, without ever waiting for it."""

import os

from prorl_envs.tools.loop import Loop
from prorl_envs.tools.output import OutputBuffer

_SIZE = 65536
# More than a terminal (64 KiB) or a pipe (64 KiB, at most 1 MiB) can hold, so a writer that never stops
# cannot keep a drain from ending.
_DRAIN_READS = 300


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
        loop.watch(fd, self._on_readable)

    def drain(self) -> None:
        """Read all that was written before now.

        Reading until nothing is left is enough, for a terminal too: before the kernel says so, it delivers
        what is still on its way.
        """
        for _ in range(_DRAIN_READS):
            try:
                data = os.read(self._fd, _SIZE)
            except OSError:  # would block; or a terminal that its last user has left
                return
            if not data:
                return
            self._buffer.feed(data)

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
