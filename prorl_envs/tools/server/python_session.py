"""Tool server's side of the Python session: forks the kernel, sends it cells, kills it.

The kernel runs the model's code, so its messages are untrusted: frames are small, typed, and matched to the
running cell.
"""

from prorl_envs.sandbox.linux.descriptors import has_exited
from prorl_envs.tools.protocol.messages import (
    Cell,
    Framer,
    Python,
    PythonDone,
    WireError,
    decode_cell_done,
    encode,
)
from prorl_envs.tools.server.fork import Kernel
from prorl_envs.tools.server.loop import EventLoop, Timer
from prorl_envs.tools.server.reader import OutputReader
from prorl_envs.tools.server.session import Cause, RequestSession, Running

#: Maximum bytes of a kernel's frame: its display data, with room for the rest of the message.
FRAME_LIMIT = 8 * 1024 * 1024
_READ_SIZE = 262144


class KernelSession(RequestSession[Python]):
    """Python session.

    Args:
        loop: the server's loop.
        workdir: directory in which a kernel starts.
        output_limit: bytes of output kept of each cell.
        grace_s: seconds between the interrupt and the kill.
    """

    def __init__(self, loop: EventLoop, *, workdir: str, output_limit: int, grace_s: float) -> None:
        super().__init__(loop, output_limit=output_limit, grace_s=grace_s)
        self._workdir = workdir
        self._framer = Framer(FRAME_LIMIT)
        self._kernel: Kernel | None = None
        self._reader: OutputReader | None = None
        self._kill_timer: Timer | None = None
        self._notice = ""
        self._breach = ""

    def start(self) -> Kernel:
        """Fork a kernel.

        Raises:
            OSError: the kernel cannot be forked.
        """
        kernel = self._kernel = Kernel(self._workdir)
        self._framer = Framer(FRAME_LIMIT)
        self._breach = ""
        self._reader = OutputReader(self.loop, kernel.output, self.output)
        self.loop.watch(kernel.control.fileno(), self._on_control)
        self.loop.watch(kernel.pidfd, self._on_exit)
        return kernel

    def close(self) -> None:
        """Kill the kernel and the processes of its cell."""
        if self._kernel is not None:
            self._kernel.kill()
            self._discard()

    def _check_exit(self) -> None:
        if self._kernel is not None and has_exited(self._kernel.pidfd):
            self._on_exit()

    def _begin(self, request: Python) -> None:
        kernel = self._kernel or self.start()
        kernel.send(encode(Cell(request.id, request.code)))

    def _discard(self) -> int:
        """Close the exited kernel; return its exit status."""
        kernel, self._kernel = self._kernel, None
        assert kernel is not None
        for fd in (kernel.output, kernel.control.fileno(), kernel.pidfd):
            self.loop.forget(fd)
        status = kernel.reap()
        kernel.close()
        return status

    def _on_control(self) -> None:
        assert self._kernel is not None and self._reader is not None
        try:
            data = self._kernel.control.recv(_READ_SIZE)
        except ConnectionResetError:
            data = b""
        if not data:  # a cell closed the socket, or the kernel exited
            self.loop.forget(self._kernel.control.fileno())
            self._kernel.kill()
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        """Process bytes from the kernel's control socket."""
        assert self._kernel is not None and self._reader is not None
        try:
            replies = [decode_cell_done(frame) for frame in self._framer.feed(data)]
        except WireError:
            self._breach = "wrote to the session's own channel and "
            self._kernel.kill()
            return
        for done in replies:
            if self.running is not None and done.id == self.running.request.id:
                self._reader.drain()
                self.finish(lambda running: self._reply(running, done.error, done.display))  # noqa: B023 - called at once

    def _on_exit(self) -> None:
        assert self._reader is not None
        self._reader.drain()
        status = self._discard()
        ended = f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"
        notice = (
            f"the Python session {self._breach}{ended}; the next cell gets a new one, without its variables"
        )
        if self.running is None:
            self._notice = f"[before this cell, {notice.replace('the next cell gets', 'this is')}]"
        else:
            self.finish(lambda running: self._reply(running, "SessionEnded", [], f"[{notice}]"))

    def _reply(
        self, running: Running[Python], error: str, display: list[dict[str, str]], notice: str = ""
    ) -> PythonDone:
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        captured = self.output.take()
        notices = [self._notice, f"[{running.stopped}]" if running.cause else "", notice]
        self._notice = ""
        return PythonDone(
            running.request.id,
            captured.text(),
            captured.omitted,
            error,
            running.cause is Cause.TIMEOUT,
            "\n".join(filter(None, notices)),
            display,
        )

    def _interrupt(self, running: Running[Python]) -> None:
        def kill() -> None:
            running.killed = True
            if self._kernel is not None:
                self._kernel.kill()

        assert self._kernel is not None
        self._kernel.interrupt()
        self._kill_timer = self.loop.call_later(self.grace_s, kill)
