"""Base of shell and Python sessions: one request at a time, each with a deadline, run by one process."""

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from prorl_envs.sandbox.linux.descriptors import has_exited
from prorl_envs.tools.protocol.messages import Bash, Python, Reply, Setup, ToolRefused
from prorl_envs.tools.protocol.output import OutputBuffer
from prorl_envs.tools.server.loop import EventLoop, Timer
from prorl_envs.tools.server.reader import OutputReader

#: Maximum number of queued requests.
QUEUE_LIMIT = 64
#: Seconds after its start during which a request is not interrupted. If the session has not read the request
#: yet, the interrupt would be lost, or would discard the typed text, and only a kill would help.
_UNINTERRUPTED_S = 0.05

type Answer = Callable[[Reply], None]


class Cause(StrEnum):
    """Reason for stopping a request."""

    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Running[RequestT: Bash | Python]:
    """Request in progress.

    Args:
        interruptible_at: earliest time of an interrupt, by the monotonic clock.
        cause: reason for stopping the request.
        killed: True if more than an interrupt was needed.
    """

    request: RequestT
    answer: Answer
    deadline: Timer | None = None
    interruptible_at: float = 0.0
    cause: Cause | None = None
    killed: bool = False


class SessionProcess(ABC):
    """Process of a session, a child of this process. Makes system calls but no decisions.

    Args:
        pid: its process id.
        output: descriptor of its output, which goes to `buffer`.
        owned: descriptors that `discard` closes.
    """

    def __init__(
        self, pid: int, output: int, owned: tuple[int, ...], *, loop: EventLoop, buffer: OutputBuffer
    ) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.reader = OutputReader(loop, output, buffer)
        self.loop = loop
        self._owned = (self.pidfd, *owned)
        #: Reason for which its session killed it, for the model; "" if it exits for another one.
        self.fault = ""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process and what runs in its foreground."""

    def discard(self) -> int:
        """Reap the exiting process and close all descriptors; return its status, negative for a signal."""
        _, status = os.waitpid(self.pid, 0)
        self.reader.stop()
        for fd in self._owned:
            self.loop.forget(fd)
            os.close(fd)
        return os.waitstatus_to_exitcode(status)


class RequestSession[RequestT: Bash | Python, ProcessT: SessionProcess](ABC):
    """Session that runs requests in order of arrival. Its process is started and restarted on demand.

    Args:
        loop: the server's loop.
        setup: the host's settings: directory, bounds of output and times.
    """

    #: Names of the session and of a request for the model, and what a new process lacks.
    kind: str
    unit: str
    state: str

    def __init__(self, loop: EventLoop, setup: Setup) -> None:
        self.loop = loop
        self.workdir = setup.workdir
        self.grace_s = setup.grace_s
        self.output = OutputBuffer(setup.output_limit)
        self.process: ProcessT | None = None
        self.running: Running[RequestT] | None = None
        #: Notices for the next reply.
        self.notices: list[str] = []
        self._waiting: deque[Running[RequestT]] = deque()

    def submit(self, request: RequestT, answer: Answer) -> None:
        """Run a request after the queued requests; `answer` is called with its reply."""
        if len(self._waiting) >= QUEUE_LIMIT:
            answer(ToolRefused(request.id, 11, f"{QUEUE_LIMIT} requests already wait in this session"))
            return
        self._waiting.append(Running(request, answer))
        self._next()

    def cancel(self, request_id: int) -> None:
        """Stop the request with this id, if this session has it. It is still answered."""
        if self.running is not None and self.running.request.id == request_id:
            self._stop(Cause.CANCELLED)
            return
        for waiting in self._waiting:
            if waiting.request.id == request_id:
                self._waiting.remove(waiting)
                waiting.answer(ToolRefused(request_id, 125, "cancelled before it ran"))
                return

    def close(self) -> None:
        """Kill the process, without an answer."""
        if self.process is not None:
            self.process.kill()
            self.process.discard()
            self.process = None

    @abstractmethod
    def _begin(self, request: RequestT) -> Reply | None:
        """Start running a request, or answer it at once.

        Raises:
            OSError: the session's process cannot be started.
        """

    @abstractmethod
    def _interrupt(self, running: Running[RequestT]) -> None:
        """Stop the request in any case: interrupt first, then kill."""

    @abstractmethod
    def _exited(self, process: ProcessT, running: Running[RequestT], status: int, notice: str) -> Reply:
        """Return the reply to a request during which the process exited."""

    def take_notices(self, *more: str) -> str:
        """Return the notices of a reply, each on a line."""
        notices, self.notices = [*self.notices, *more], []
        return "\n".join(filter(None, notices))

    def how_stopped(self, running: Running[RequestT]) -> str:
        """Return a notice of how a request was stopped; "" if it was not stopped."""
        if running.cause is None:
            return ""
        timed_out = f"timed out after {running.request.timeout_s:g} s"
        cause = timed_out if running.cause is Cause.TIMEOUT else "cancelled"
        how = "it ignored the interrupt and was killed" if running.killed else "it was interrupted"
        return f"[{cause}: {how}]"

    def finish(self, reply: Reply) -> None:
        """Answer the running request and start the next one."""
        running, self.running = self.running, None
        assert running is not None and running.deadline is not None
        running.deadline.cancel()
        running.answer(reply)
        self._next()

    def on_exit(self) -> None:
        """Discard the exited process. The reply to the running request says so, or the next reply."""
        process, self.process = self.process, None
        assert process is not None
        process.reader.drain()
        status = process.discard()
        ended = f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"
        ended = f"the {self.kind} {process.fault or ended}"
        if self.running is None:
            self.notices.append(
                f"[before this {self.unit}, {ended}; this is a new one, without {self.state}]"
            )
        else:
            notice = f"[{ended}; the next {self.unit} gets a new one, without {self.state}]"
            self.finish(self._exited(process, self.running, status, notice))

    def _next(self) -> None:
        while self._waiting and self.running is None:
            # If the event of an exit has not arrived yet, the exit would be attributed to this request.
            if self.process is not None and has_exited(self.process.pidfd):
                self.on_exit()
            running = self.running = self._waiting.popleft()
            request = running.request
            try:
                reply = self._begin(request)
            except OSError as error:
                reply = ToolRefused(request.id, error.errno or 0, error.strerror or str(error))
            if reply is None:
                running.interruptible_at = time.monotonic() + _UNINTERRUPTED_S
                running.deadline = self.loop.call_later(request.timeout_s, lambda: self._stop(Cause.TIMEOUT))
            else:
                self.running = None
                running.answer(reply)

    def _stop(self, cause: Cause) -> None:
        running = self.running
        assert running is not None
        if running.cause is None:
            running.cause = cause
            delay_s = running.interruptible_at - time.monotonic()
            self.loop.call_later(delay_s, lambda: self._interrupt_if_running(running))

    def _interrupt_if_running(self, running: Running[RequestT]) -> None:
        if self.running is running:
            self._interrupt(running)
