"""Base of shell and Python sessions: one request at a time, each with a deadline."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from prorl_envs.tools.protocol.messages import Bash, Python, Reply, ToolRefused
from prorl_envs.tools.protocol.output import OutputBuffer
from prorl_envs.tools.server.loop import EventLoop, Timer

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

    @property
    def stopped(self) -> str:
        """Description of how the request was stopped, for the notice; "" if it was not stopped."""
        if self.cause is None:
            return ""
        timed_out = f"timed out after {self.request.timeout_s:g} s"
        cause = timed_out if self.cause is Cause.TIMEOUT else "cancelled"
        return (
            f"{cause}: {'it ignored the interrupt and was killed' if self.killed else 'it was interrupted'}"
        )


class RequestSession[RequestT: Bash | Python](ABC):
    """Session that runs requests in order of arrival. Its process is started and restarted on demand.

    Args:
        loop: the server's loop.
        output_limit: bytes of output kept of each request.
        grace_s: seconds between an interrupt and the next, harder step.
    """

    def __init__(self, loop: EventLoop, *, output_limit: int, grace_s: float) -> None:
        self.loop = loop
        self.grace_s = grace_s
        self.output = OutputBuffer(output_limit)
        self.running: Running[RequestT] | None = None
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

    @abstractmethod
    def close(self) -> None:
        """Kill the running process, without an answer."""

    @abstractmethod
    def _check_exit(self) -> None:
        """Handle an exit of the session's process for which no event has arrived yet.

        Called between two requests. Otherwise the exit would be attributed to the next request.
        """

    @abstractmethod
    def _begin(self, request: RequestT) -> Reply | None:
        """Start running a request, or answer it at once.

        Raises:
            OSError: the session's process cannot be started.
        """

    @abstractmethod
    def _interrupt(self, running: Running[RequestT]) -> None:
        """Stop the request in any case: interrupt first, then kill."""

    def finish(self, make_reply: Callable[[Running[RequestT]], Reply]) -> None:
        """Answer the running request and start the next one."""
        running, self.running = self.running, None
        assert running is not None and running.deadline is not None
        running.deadline.cancel()
        running.answer(make_reply(running))
        self._next()

    def _next(self) -> None:
        while self._waiting and self.running is None:
            self._check_exit()
            running = self.running = self._waiting.popleft()
            request = running.request
            try:
                reply = self._begin(request)
            except OSError as error:
                self.running = None
                running.answer(ToolRefused(request.id, error.errno or 0, error.strerror or str(error)))
                continue
            if reply is not None:
                self.running = None
                running.answer(reply)
            else:
                self._set_deadline(running)

    def _set_deadline(self, running: Running[RequestT]) -> None:
        running.interruptible_at = time.monotonic() + _UNINTERRUPTED_S
        running.deadline = self.loop.call_later(running.request.timeout_s, lambda: self._stop(Cause.TIMEOUT))

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
