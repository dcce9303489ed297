"""HTTP on a listening socket with bounded connections, for clients that are not authenticated yet.

The service and the model endpoints inside sandboxes share this listener.
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

#: Seconds between two log lines for the same reason.
LOG_EVERY_S = 60.0
#: Seconds until the next try if no connection can be accepted; most connections accepted in a row.
_RETRY_S, _AT_ONCE = 0.2, 32
#: `accept` errors that mean exhausted resources; any other error means that the client has gone.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
_MESSAGES = {
    "head_timeout": "HTTP: closed %d connections whose request head did not come in time (%d open of %d)",
    "body_timeout": "HTTP: closed %d connections whose request body did not come in time (%d open of %d)",
    "invalid": "HTTP: refused %d malformed requests (%d connections open of %d)",
    "evicted": "HTTP: closed %d connections without a request to make room for others (%d open of %d)",
    "refused": "HTTP: refused %d connections with 503, for all are at work (%d open of %d)",
    "descriptors": "HTTP: %d times no connection could be accepted for lack of descriptors (%d open of %d)",
}
#: Default bounds.
DEFAULT_LIMITS = ConnectionLimits()
#: Reasons for which a listener closes or refuses connections.
REASONS = tuple(_MESSAGES)


class HttpListener:
    """Server of an application on a listening socket, from construction until `aclose`.

    Args:
        app: answers the requests.
        listener: listening socket; this object takes ownership.
        limits: bounds.
        counts: updated by this object, for metrics.
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
        self._listener = listener
        listener.setblocking(False)
        self._open: set[BoundedConnection] = set()
        self._freed = asyncio.Event()  # set when a connection closes or becomes idle
        self._logged: dict[str, tuple[float, int]] = {}
        self._second = 0
        self._connecting: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    @property
    def port(self) -> int:
        """TCP port of the socket."""
        return cast(int, self._listener.getsockname()[1])

    def left(self, connection: BoundedConnection) -> None:
        """Forget a closed connection."""
        self._open.discard(connection)
        self._counts.open = len(self._open)
        self._freed.set()

    def waits(self, connection: BoundedConnection) -> None:
        """Register a connection that has no request."""
        self.waiting.setdefault(connection)
        self._freed.set()

    def closed(self, reason: str) -> None:
        """Count a closed or refused connection, and log one line per interval and reason."""
        self._counts.closed[reason] += 1
        now, (logged_at, counted) = time.monotonic(), self._logged.get(reason, (-LOG_EVERY_S, 0))
        if now - logged_at >= LOG_EVERY_S:
            total = self._counts.closed[reason]
            log.warning(_MESSAGES[reason], total - counted, self._counts.open, self._counts.limit)
            self._logged[reason] = (now, total)

    def set_date(self) -> None:
        """Update the Date header, at most once a second."""
        if (now := int(time.time())) != self._second:
            self._second = now
            self.state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]

    async def drain(self, seconds: float) -> None:
        """Accept no more connections, wait up to `seconds` for requests, then cancel the remaining ones."""
        await self._stop_accepting()
        for connection in list(self._open):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._open:
                    self._freed.clear()
                    await self._freed.wait()
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
        self._listener.close()

    async def _accept(self) -> None:
        accepted = 0
        while True:
            try:
                client = await self._next_client()
            except OSError as error:
                await self._cannot_accept(error)
                continue
            await self._take(client)
            accepted += 1
            if accepted % _AT_ONCE == 0:
                await asyncio.sleep(0)  # let requests run

    async def _next_client(self) -> socket.socket:
        """Return the next client. The loop's `sock_accept` loses a client that arrives on cancellation."""
        while True:
            with contextlib.suppress(BlockingIOError):
                client, _ = self._listener.accept()
                return client
            await _readable(self._listener)

    async def _take(self, client: socket.socket) -> None:
        """Serve a client, or refuse it."""
        try:
            room = await self._make_room()
        except asyncio.CancelledError:
            client.close()
            raise
        client.setblocking(False)
        if not room:
            self.closed("refused")
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
        """Return whether one more connection fits; evict a connection without a request if necessary. If
        `limits.refuse` is false, wait until one fits."""
        while len(self._open) >= self._counts.limit and not self._evict():
            if self.limits.refuse:
                return False
            self._freed.clear()
            await self._freed.wait()
        return True

    async def _connect(self, connection: BoundedConnection, client: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, client)
        except OSError:
            self.left(connection)
            client.close()

    def _evict(self) -> bool:
        """Close the connection that has waited longest for a request. Return whether there was one."""
        if not self.waiting:
            return False
        connection = next(iter(self.waiting))
        self.waiting.pop(connection)
        self.closed("evicted")
        connection.transport.abort()
        self.left(connection)
        return True

    async def _cannot_accept(self, error: OSError) -> None:
        if error.errno in _EXHAUSTED:
            self.closed("descriptors")
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
    """Answer 503 and close. Read a request that has arrived first: otherwise, closing discards the answer."""
    with contextlib.closing(client), contextlib.suppress(OSError):
        with contextlib.suppress(BlockingIOError):
            client.recv(HEAD_BYTES)
        client.send(_REFUSAL)
        client.shutdown(socket.SHUT_WR)
