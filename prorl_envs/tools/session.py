"""What a shell session and a Python session have in common: one request at a time, each with an end."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from prorl_envs.tools.loop import Loop, Timer
from prorl_envs.tools.output import OutputBuffer
from prorl_envs.tools.wire import Bash, Python, Refused, Reply

#: Requests that may wait for the one that runs.
QUEUE_LIMIT = 64
#: Seconds after its beginning in which a request is not interrupted: what runs it may still be about to read
#: it. An interrupt then is lost, or takes what was typed with it, and only killing helps.
_RIPE_S = 0.05

type Answer = Callable[[Reply], None]


class Cause(StrEnum):
    """Why a request is being stopped."""

    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Running[RequestT: Bash | Python]:
    """The request under way.

    Args:
        ripe: when it may be interrupted, by the monotonic clock.
        cause: why it is being stopped.
        killed: whether more than an interrupt was needed.
    """

    request: RequestT
    answer: Answer
    deadline: Timer | None = None
    ripe: float = 0.0
    cause: Cause | None = None
    killed: bool = False

    @property
    def stopped(self) -> str:
        """What was done to it, for the notice; empty where nothing was."""
        if self.cause is None:
            return ""
        timed_out = f"timed out after {self.request.timeout_s:g} s"
        why = timed_out if self.cause is Cause.TIMEOUT else "cancelled"
        return f"{why}: {'it ignored the interrupt and was killed' if self.killed else 'it was interrupted'}"


class Session[RequestT: Bash | Python](ABC):
    """Runs requests in the order they come in. What runs them is started at need and again when it has ended.

    Args:
        loop: the server's loop.
        output_limit: bytes of output kept of each request.
        grace_s: seconds an interrupted request has before the next, harder step.
    """

    def __init__(self, loop: Loop, *, output_limit: int, grace_s: float) -> None:
        self.loop = loop
        self.grace_s = grace_s
        self.output = OutputBuffer(output_limit)
        self.running: Running[RequestT] | None = None
        #: Whether the host drives what runs the requests: see `lent.py`.
        self.lent = False
        self._waiting: deque[Running[RequestT]] = deque()

    def submit(self, request: RequestT, answer: Answer) -> None:
        """Run a request once those before it have ended; `answer` is called with its reply."""
        if self.lent:  # it was sent before the host knew
            self._own()
        if len(self._waiting) >= QUEUE_LIMIT:
            answer(Refused(request.id, 11, f"{QUEUE_LIMIT} requests already wait in this session"))
            return
        self._waiting.append(Running(request, answer))
        self._next()

    @property
    def queued(self) -> bool:
        """Whether requests wait for the one that runs."""
        return bool(self._waiting)

    def resume(self, request: RequestT, answer: Answer, spent_s: float) -> None:
        """Take over a request that has run elsewhere for so many seconds."""
        assert self.running is None
        self.running = Running(request, answer)
        self._set_deadline(self.running, request.timeout_s - spent_s)

    def cancel(self, request_id: int) -> None:
        """Stop the request with this id, if it is here. It answers all the same."""
        if self.running is not None and self.running.request.id == request_id:
            self._stop(Cause.CANCELLED)
            return
        for waiting in self._waiting:
            if waiting.request.id == request_id:
                self._waiting.remove(waiting)
                waiting.answer(Refused(request_id, 125, "cancelled before it ran"))
                return

    @abstractmethod
    def close(self) -> None:
        """End what runs, without an answer."""

    @abstractmethod
    def _own(self) -> None:
        """The end of a loan."""

    @abstractmethod
    def _settle(self) -> None:
        """Between two requests: take note if what runs them has ended, though no event has told of it yet.
        Else the next request would be taken for the one that it ended in."""

    @abstractmethod
    def _begin(self, request: RequestT) -> Reply | None:
        """Start running a request, or answer it at once.

        Raises:
            OSError: what would run it cannot be started.
        """

    @abstractmethod
    def _interrupt(self, running: Running[RequestT]) -> None:
        """Make the request end, whatever it does: ask at first, then kill."""

    def finish(self, make_reply: Callable[[Running[RequestT]], Reply]) -> None:
        """Answer the request under way and go on with the next."""
        running, self.running = self.running, None
        assert running is not None and running.deadline is not None
        running.deadline.cancel()
        running.answer(make_reply(running))
        self._next()

    def _next(self) -> None:
        while self._waiting and self.running is None:
            self._settle()
            running = self.running = self._waiting.popleft()
            request = running.request
            try:
                reply = self._begin(request)
            except OSError as error:
                self.running = None
                running.answer(Refused(request.id, error.errno or 0, error.strerror or str(error)))
                continue
            if reply is not None:
                self.running = None
                running.answer(reply)
            else:
                self._set_deadline(running, request.timeout_s)

    def _set_deadline(self, running: Running[RequestT], left_s: float) -> None:
        running.ripe = time.monotonic() + _RIPE_S - (running.request.timeout_s - left_s)
        running.deadline = self.loop.call_later(left_s, lambda: self._stop(Cause.TIMEOUT))

    def _stop(self, cause: Cause) -> None:
        running = self.running
        assert running is not None
        if running.cause is None:
            running.cause = cause
            self.loop.call_later(running.ripe - time.monotonic(), lambda: self._interrupt_ripe(running))

    def _interrupt_ripe(self, running: Running[RequestT]) -> None:
        if self.running is running:
            self._interrupt(running)
