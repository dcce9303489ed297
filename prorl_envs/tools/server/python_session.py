"""Tool server's side of the Python session: forks the kernel, sends it cells, kills it.

The kernel runs the model's code, so its messages are untrusted: frames are small, typed, and matched to the
running cell.
"""

import os

from prorl_envs.tools.protocol.messages import Python, PythonDone, Setup, WireError, decode_cell_done, encode
from prorl_envs.tools.server.fork import Kernel
from prorl_envs.tools.server.loop import EventLoop
from prorl_envs.tools.server.session import Cause, RequestSession, Running

_READ_SIZE = 262144


class KernelSession(RequestSession[Python, Kernel]):
    """Python session.

    Args:
        loop, setup: see `RequestSession`.
        memory: descriptor of the memory that the first kernel is to get; closed.
    """

    kind, unit, state = "Python session", "cell", "its variables"

    def __init__(self, loop: EventLoop, setup: Setup, memory: int | None = None) -> None:
        super().__init__(loop, setup)
        self._memory = memory

    def start(self) -> Kernel:
        """Fork a kernel.

        Raises:
            OSError: the kernel cannot be forked.
        """
        kernel = self.process = Kernel(self.workdir, self.loop, self.output, self._memory)
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None
        self.loop.watch(kernel.control.fileno(), self._on_control)
        self.loop.watch(kernel.pidfd, self.on_exit)
        return kernel

    def _begin(self, request: Python) -> None:
        kernel = self.process or self.start()
        kernel.send(encode(request))

    def _on_control(self) -> None:
        kernel = self.process
        assert kernel is not None
        try:
            data = kernel.control.recv(_READ_SIZE)
        except ConnectionResetError:
            data = b""
        if not data:  # a cell closed the socket, or the kernel exited
            self.loop.forget(kernel.control.fileno())
            kernel.kill()
            return
        try:
            replies = [decode_cell_done(frame) for frame in kernel.framer.feed(data)]
        except WireError:
            kernel.fault = "wrote to the session's own channel and was killed by signal 9"
            kernel.kill()
            return
        for done in replies:
            if self.running is not None and done.id == self.running.request.id:
                kernel.reader.drain()
                self.finish(self._reply(self.running, done.error, done.display))

    def _exited(self, process: Kernel, running: Running[Python], status: int, notice: str) -> PythonDone:
        return self._reply(running, "SessionEnded", [], notice)

    def _reply(
        self, running: Running[Python], error: str, display: list[dict[str, str]], notice: str = ""
    ) -> PythonDone:
        captured = self.output.take()
        return PythonDone(
            running.request.id,
            captured.text(),
            captured.omitted,
            error,
            running.cause is Cause.TIMEOUT,
            self.take_notices(self.how_stopped(running), notice),
            display,
        )

    def _interrupt(self, running: Running[Python]) -> None:
        def kill() -> None:
            if self.running is running and self.process is not None:
                running.killed = True
                self.process.kill()

        assert self.process is not None
        self.process.interrupt()
        self.loop.call_later(self.grace_s, kill)
