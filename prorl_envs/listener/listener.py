"""HTTP listener with bounded connections, for clients that are not authenticated yet.

The service and the model endpoints inside sandboxes use it.
"""

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import time
from email.utils import formatdate
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from prorl_envs.listener.connection import HEAD_BYTES, BoundedConnection, ConnectionCounts, ConnectionLimits

log = logging.getLogger(__name__)

#: Minimum seconds between two log lines for the same reason.
LOG_EVERY_S = 60.0
#: Seconds before the next try if no connection can be accepted; maximum number of accepts in a row.
_RETRY_S, _MAX_ACCEPTS = 0.2, 32
#: Errors of `accept` that mean exhausted resources. Other errors mean that the client has closed.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
_MESSAGES = {
    "head_timeout": "HTTP: closed %d connections whose request head did not arrive in time (%d open of %d)",
    "body_timeout": "HTTP: closed %d connections whose request body did not arrive in time (%d open of %d)",
    "invalid": "HTTP: refused %d malformed requests (%d connections open of %d)",
    "evicted": "HTTP: closed %d connections without a request to make room for others (%d open of %d)",
    "refused": "HTTP: refused %d connections with 503, since all others are busy (%d open of %d)",
    "descriptors": "HTTP: could not accept %d connections, for lack of file descriptors (%d open of %d)",
}
#: Default limits.
DEFAULT_LIMITS = ConnectionLimits()
#: Reasons for which a listener closes or refuses connections.
REASONS = tuple(_MESSAGES)


class HttpListener:
    """HTTP server of an application on a listening socket. It accepts connections until `drain` or `aclose`.

    Args:
        app: answers the requests.
        listener: listening socket; this object closes it.
        limits: limits of connections.
        counts: connection counts, which this object updates.
        log_level: lowest level of uvicorn's own log, such as "critical"; None leaves it unchanged.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        *,
        counts: ConnectionCounts | None = None,
        log_level: str | None = None,
    ) -> None:
        self.limits = limits
        self.config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level=log_level,
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        self.config.load()
        self.state = ServerState()
        #: Connections without a request, the longest waiting first.
        self.waiting: dict[BoundedConnection, None] = {}
        self._counts = counts if counts is not None else ConnectionCounts()
        self._counts.limit = min(limits.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._socket = listener
        listener.setblocking(False)
        self._open: set[BoundedConnection] = set()
        self._changed = asyncio.Event()  # set when a connection closes or waits for a request
        self._logged: dict[str, tuple[float, int]] = {}
        self._date_second = 0
        self._connecting: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    @property
    def port(self) -> int:
        """TCP port of the socket."""
        return cast(int, self._socket.getsockname()[1])

    def remove(self, connection: BoundedConnection) -> None:
        """Forget a closed connection."""
        self._open.discard(connection)
        self._counts.open = len(self._open)
        self._changed.set()

    def mark_waiting(self, connection: BoundedConnection) -> None:
        """Register a connection that has no request."""
        self.waiting.setdefault(connection)
        self._changed.set()

    def count_closed(self, reason: str) -> None:
        """Count a closed or refused connection, and log one line per interval and reason."""
        self._counts.closed[reason] += 1
        now, (logged_at, counted) = time.monotonic(), self._logged.get(reason, (-LOG_EVERY_S, 0))
        if now - logged_at >= LOG_EVERY_S:
            total = self._counts.closed[reason]
            log.warning(_MESSAGES[reason], total - counted, self._counts.open, self._counts.limit)
            self._logged[reason] = (now, total)

    def set_date(self) -> None:
        """Update the Date header, at most once a second."""
        if (now := int(time.time())) != self._date_second:
            self._date_second = now
            self.state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]

    async def drain(self, seconds: float) -> None:
        """Stop accepting, wait up to `seconds` for open requests, then cancel the remaining ones."""
        await self._stop_accepting()
        for connection in list(self._open):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._open:
                    self._changed.clear()
                    await self._changed.wait()
        for task in self.state.tasks:
            task.cancel()

    async def aclose(self) -> None:
        """Close the socket and every connection, and wait until the application has finished. Idempotent."""
        await self._stop_accepting()
        for connection in list(self._open):
            connection.transport.abort()
        while self.state.tasks:
            await asyncio.wait(set(self.state.tasks))

    async def _stop_accepting(self) -> None:
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        if self._connecting:
            await asyncio.wait(self._connecting)
        self._socket.close()

    async def _accept(self) -> None:
        accepted = 0
        while True:
            try:
                client = await self._next_client()
            except OSError as error:
                await self._cannot_accept(error)
                continue
            await self._serve_client(client)
            accepted += 1
            if accepted % _MAX_ACCEPTS == 0:
                await asyncio.sleep(0)  # let requests run

    async def _next_client(self) -> socket.socket:
        """Return the next client. asyncio's `sock_accept` is not used: if cancelled, it can lose a client."""
        while True:
            with contextlib.suppress(BlockingIOError):
                client, _ = self._socket.accept()
                return client
            await _readable(self._socket)

    async def _serve_client(self, client: socket.socket) -> None:
        """Serve a client, or refuse it."""
        try:
            has_room = await self._make_room()
        except asyncio.CancelledError:
            client.close()
            raise
        client.setblocking(False)
        if not has_room:
            self.count_closed("refused")
            _refuse(client)
            return
        with contextlib.suppress(OSError):  # the client may have gone
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = BoundedConnection(self)
        self._open.add(connection)
        self._counts.open = len(self._open)
        task = asyncio.create_task(self._connect(connection, client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _make_room(self) -> bool:
        """Return True if one more connection is allowed. If necessary, evict a connection without a request.
        Without `limits.refuse`, wait until a connection is allowed."""
        while len(self._open) >= self._counts.limit and not self._evict():
            if self.limits.refuse:
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    async def _connect(self, connection: BoundedConnection, client: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, client)
        except OSError:
            self.remove(connection)
            client.close()

    def _evict(self) -> bool:
        """Close the connection that has waited longest for a request. Return False if there is none."""
        if not self.waiting:
            return False
        connection = next(iter(self.waiting))
        self.waiting.pop(connection)
        self.count_closed("evicted")
        connection.transport.abort()
        self.remove(connection)
        return True

    async def _cannot_accept(self, error: OSError) -> None:
        if error.errno in _EXHAUSTED:
            self.count_closed("descriptors")
            self._evict()
            await asyncio.sleep(_RETRY_S)


async def _readable(listener: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)


def _refuse(client: socket.socket) -> None:
    """Answer 503 and close. Received bytes are read first, or closing would discard the answer."""
    with contextlib.closing(client), contextlib.suppress(OSError):
        with contextlib.suppress(BlockingIOError):
            client.recv(HEAD_BYTES)
        client.send(_REFUSAL)
        client.shutdown(socket.SHUT_WR)
