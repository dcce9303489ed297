"""HTTP connection with bounds on request heads and on the time that its client takes.

uvicorn parses and answers. It bounds neither the time of a request nor heads that httptools reads (httptools
takes a fifth of h11's time).
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

#: Most bytes of a head, of a body's trailers and between two of its chunks; most lines of a head.
HEAD_BYTES, HEAD_LINES = 64 * 1024, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one listener.

    Args:
        connections: open at once; at most half of the process's file descriptors.
        head_s: seconds from the opening of the connection, or from the first byte of a later request, to the
            end of the head.
        body_s: seconds from the end of the head to the end of the body.
        keep_alive_s: seconds for which a connection may idle between two requests.
        refuse: whether a client is answered 503 if every connection is busy; if false, the client waits.
    """

    connections: int = 4096
    head_s: float = 10.0
    body_s: float = 120.0
    keep_alive_s: float = 120.0
    refuse: bool = True


@dataclass(slots=True)
class ConnectionCounts:
    """Connections of one listener, for metrics.

    Args:
        open: connections open now.
        limit: most connections open at once.
        closed: connections that the listener closed or refused, by reason: `head_timeout`, `body_timeout`,
            `invalid`, `evicted` (it had no request, and another client needed its place), `refused`,
            `descriptors` (the process has no free file descriptor).
    """

    open: int = 0
    limit: int = 0
    closed: Counter[str] = field(default_factory=Counter)


class _Phase(Enum):
    """Next input that a client may send."""

    HEAD = auto()
    BODY = auto()
    ANSWERED = auto()  # nothing: the request is complete, its answer is not
    IDLE = auto()


class ConnectionOwner(Protocol):
    """Interface of the listener for its connections."""

    config: uvicorn.Config
    state: ServerState
    limits: ConnectionLimits
    #: Connections without a request, the longest waiting first.
    waiting: "dict[BoundedConnection, None]"

    def set_date(self) -> None: ...

    def waits(self, connection: "BoundedConnection") -> None: ...

    def left(self, connection: "BoundedConnection") -> None: ...

    def closed(self, reason: str) -> None: ...


class BoundedConnection(HttpToolsProtocol):
    """One connection. `_unparsed` counts bytes since the parser last reported progress."""

    def __init__(self, listener: ConnectionOwner) -> None:
        super().__init__(listener.config, listener.state, {})
        self._listener = listener
        self._phase = _Phase.HEAD
        self._timer: asyncio.TimerHandle | None = None
        self._timed = ""  # reason of the timer
        self._unparsed = self._lines = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
            raise ValueError("too many headers")  # stops llhttp
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._phase, self._unparsed = _Phase.BODY, 0
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Reset the byte count; called by the parser."""
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
        self._listener.left(self)

    def _set_timer(self) -> None:
        """Bound the time for the next part of the request. Single bytes do not extend it."""
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        limits = self._listener.limits
        match self._phase:
            case _Phase.IDLE:
                reason, seconds = "idle", limits.keep_alive_s
            case _Phase.BODY if answering:
                reason, seconds = "body_timeout", limits.body_s
            case _Phase.HEAD | _Phase.BODY if not answering:
                reason, seconds = "head_timeout", limits.head_s
            case _:
                reason, seconds = "", 0.0
        if reason == self._timed:
            return
        self._stop_timer()
        self._timed = reason
        if reason:
            self._timer = self.loop.call_later(seconds, self._expired)
        if reason in ("idle", "head_timeout"):
            self._listener.waits(self)

    def _stop_timer(self) -> None:
        self._timed = ""
        self._listener.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self) -> None:
        reason = self._timed
        self._stop_timer()
        if reason == "body_timeout" and self.flow.read_paused:
            self._set_timer()  # the service is slow to read, not the client to send
            return
        if reason != "idle":
            self._listener.closed(reason)
        self.transport.abort()

    def _refuse(self, problem: str) -> None:
        self._listener.closed("invalid")
        self.send_400_response(problem)
