"""HTTP connection with limits for request heads and for the time that the client takes.

uvicorn parses requests and sends responses, with httptools, which takes a fifth of h11's time. But uvicorn
limits neither the time of a request nor, with httptools, the size of its head.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from prorl_envs.listener.listener import HttpListener

#: Maximum bytes of a head, of a body's trailers, and between two chunks of a body; maximum lines of a head.
HEAD_BYTES, HEAD_LINES = 64 * 1024, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one listener.

    Args:
        connections: maximum number of open connections, at most half of the process's file descriptors.
        head_s: maximum seconds for a head, from the connection's start or a later request's first byte.
        body_s: maximum seconds from the end of the head to the end of the body, without the time in which the
            application does not read.
        keep_alive_s: maximum seconds for which a connection may idle between two requests.
        refuse: if every connection has a request, a further client receives 503 (True) or waits (False).
    """

    connections: int = 4096
    head_s: float = 10.0
    body_s: float = 120.0
    keep_alive_s: float = 120.0
    refuse: bool = True


@dataclass(slots=True)
class ConnectionCounts:
    """Connection counts of one listener, for metrics.

    Args:
        open: number of open connections.
        limit: maximum number of open connections.
        closed: number of connections that the listener closed or refused, by reason: `head_timeout`,
            `body_timeout`, `invalid`, `evicted` (without a request, in favour of another client), `refused`,
            `descriptors` (the process has no free file descriptor).
    """

    open: int = 0
    limit: int = 0
    closed: Counter[str] = field(default_factory=Counter)


class _Phase(Enum):
    """Next input that a client may send."""

    HEAD = auto()
    BODY = auto()
    ANSWERED = auto()  # nothing: the request is complete, but its response is not
    IDLE = auto()


class _Flow(FlowControl):
    """Flow control that stops a connection's timer while the application does not read."""

    def __init__(self, connection: "BoundedConnection", transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._connection = connection

    def pause_reading(self) -> None:
        super().pause_reading()
        self._connection.hold_timer()

    def resume_reading(self) -> None:
        super().resume_reading()
        self._connection.continue_timer()


class BoundedConnection(HttpToolsProtocol):
    """HTTP connection. `_unparsed` counts the bytes since the parser last reported progress."""

    def __init__(self, listener: "HttpListener") -> None:
        super().__init__(listener.config, listener.state, {})
        self._listener = listener
        self._phase = _Phase.HEAD
        self._timer: asyncio.TimerHandle | None = None
        self._timer_reason = ""  # "idle", "head_timeout" or "body_timeout"
        self._held_s: float | None = None  # seconds left to a timer that is held
        self._unparsed = self._lines = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(self, transport)
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # upgrades are ignored
        except httptools.HttpParserError:
            self._refuse("Invalid HTTP request received.")
            return
        if self._unparsed > HEAD_BYTES:
            self._refuse("The head of the request is too large.")
            return
        self._set_timer()

    def on_message_begin(self) -> None:
        self._phase, self._lines = _Phase.HEAD, 0
        self._listener.set_date()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += 1
        if self._lines > HEAD_LINES:
            raise ValueError("too many headers")  # stops the parser
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._phase, self._unparsed = _Phase.BODY, 0
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Reset the byte count. The parser calls this method."""
        self._unparsed = 0

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase = _Phase.IDLE if self.cycle.response_complete else _Phase.ANSWERED
        self._unparsed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # `_set_timer` replaces it
        if self._phase is _Phase.ANSWERED:
            self._phase = _Phase.IDLE
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._listener.remove(self)

    def _set_timer(self) -> None:
        """Start a timer for the next part of the request. Later bytes of the same part do not extend it."""
        if self.transport.is_closing():
            return
        response_open = self.cycle is not None and not self.cycle.response_complete
        limits = self._listener.limits
        match self._phase:
            case _Phase.IDLE:
                reason, seconds = "idle", limits.keep_alive_s
            case _Phase.BODY if response_open:
                reason, seconds = "body_timeout", limits.body_s
            case _Phase.HEAD | _Phase.BODY if not response_open:
                reason, seconds = "head_timeout", limits.head_s
            case _:
                reason, seconds = "", 0.0
        if reason == self._timer_reason:
            return
        self._stop_timer()
        self._timer_reason = reason
        if reason:
            self._timer = self.loop.call_later(seconds, self._on_timer)
        if self.flow.read_paused:
            self.hold_timer()
        if reason in ("idle", "head_timeout"):
            self._listener.mark_waiting(self)

    def hold_timer(self) -> None:
        """Stop the time of a body, because the client cannot send."""
        if self._timer is not None and self._timer_reason == "body_timeout":
            self._held_s = self._timer.when() - self.loop.time()
            self._timer.cancel()
            self._timer = None

    def continue_timer(self) -> None:
        """Let the time of a body go on, if it is held."""
        if self._held_s is not None:
            self._timer = self.loop.call_later(self._held_s, self._on_timer)
            self._held_s = None

    def _stop_timer(self) -> None:
        self._timer_reason, self._held_s = "", None
        self._listener.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        reason = self._timer_reason
        self._stop_timer()
        if reason != "idle":
            self._listener.count_closed(reason)
        self.transport.abort()

    def _refuse(self, problem: str) -> None:
        self._listener.count_closed("invalid")
        self.send_400_response(problem)
