"""The Python session of a sandbox, seen from its tool server: forks the kernel, feeds it, ends it.

The kernel runs what the model wrote, so every word of it is hostile: frames are small, typed and matched to
the cell that runs, and the kernel has none of the server's descriptors.
"""

import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from prorl_envs.tools.loop import Loop, Timer
from prorl_envs.tools.output import OutputBuffer
from prorl_envs.tools.wire import (
    Cell,
    Framer,
    Python,
    PythonDone,
    Refused,
    WireError,
    decode_cell_done,
    encode,
)

#: Bytes of the longest frame a kernel may send: its display data and room for the rest.
KERNEL_FRAME_LIMIT = 8 * 1024 * 1024
QUEUE_LIMIT = 64
_READ_SIZE = 65536
_DRAIN_READS = 64  # a pipe holds 64 KiB unless asked for more, and then 1 MiB

type Answer = Callable[[PythonDone | Refused], None]


class Kernel:
    """A forked kernel process and the descriptors to it. Does the system calls; decides nothing.

    Args:
        workdir: its first directory.

    Raises:
        OSError: it cannot be forked.
    """

    def __init__(self, workdir: str) -> None:
        self.control, inside = socket.socketpair()
        self.output, output = os.pipe()
        with inside:
            try:
                self.pid = os.fork()
                if self.pid == 0:
                    _become_kernel(workdir, inside.fileno(), output)
            except OSError:
                self.control.close()
                os.close(self.output)
                raise
            finally:
                os.close(output)
        self.pidfd = os.pidfd_open(self.pid)
        os.set_blocking(self.output, False)

    def interrupt(self) -> None:
        """Ctrl-C for the kernel and the processes its cell started."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def reap(self) -> int:
        """The exit status, negative for a signal; waits for it."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """Close all descriptors. The process must have been reaped."""
        self.control.close()
        os.close(self.output)
        os.close(self.pidfd)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # not yet the leader of its group
            signal.pidfd_send_signal(self.pidfd, number)


def _become_kernel(workdir: str, control: int, output: int) -> None:
    """The forked child's whole life."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        # Two steps, so that no target overwrites a source.
        high = [os.dup(fd) + 0 for fd in (null, output, output, control)]
        high = [_above(fd, 10) for fd in high]
        for target, fd in enumerate(high):
            os.dup2(fd, target, inheritable=target < 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(workdir)
        from prorl_envs.tools.kernel import main  # only here: a server without Python need not know IPython

        main()
    finally:
        os._exit(0)


@dataclass(slots=True)
class _Running:
    request: Python
    answer: Answer
    timer: Timer | None = None
    cause: str = ""  # why it is being stopped: "timeout", "cancelled", or not at all


class KernelSession:
    """One Python session: its kernel, the cell that runs, and those that wait.

    Args:
        loop: the server's loop.
        workdir: where a kernel starts.
        output_limit: bytes of output kept of each cell.
        grace_s: seconds between the interrupt and the kill.
    """

    def __init__(self, loop: Loop, *, workdir: str, output_limit: int, grace_s: float) -> None:
        self._loop = loop
        self._workdir = workdir
        self._grace_s = grace_s
        self._output = OutputBuffer(output_limit)
        self._framer = Framer(KERNEL_FRAME_LIMIT)
        self._kernel: Kernel | None = None
        self._notice = ""
        self._running: _Running | None = None
        self._waiting: deque[tuple[Python, Answer]] = deque()

    def start(self) -> Kernel:
        """Fork a kernel now.

        Raises:
            OSError: it cannot be forked.
        """
        kernel = self._kernel = Kernel(self._workdir)
        self._framer = Framer(KERNEL_FRAME_LIMIT)
        self._loop.watch(kernel.output, self._on_output)
        self._loop.watch(kernel.control.fileno(), self._on_control)
        self._loop.watch(kernel.pidfd, self._on_exit)
        return kernel
