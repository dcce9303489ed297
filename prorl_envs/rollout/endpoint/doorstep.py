"""The endpoint on a socket that listens in a sandbox. Clients are hostile: connections are bounded.

The socket was made in the sandbox's network namespace; whoever accepts on it is here, outside. So nothing is
relayed, and nothing of the endpoint runs inside.
"""

import asyncio
import contextlib
import logging
import math
import socket
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

log = logging.getLogger(__name__)

#: Connections of one sandbox at a time; further ones wait in the kernel's queue.
CONNECTIONS = 64
#: Bytes and lines of a request before its body.
HEAD_BYTES, _HEADERS = 64 * 1024, 128
#: Seconds that a connection may idle before the head of its first request has come, and between two.
IDLE_S = 30.0
_RETRY_S = 0.2


class _Connection(HttpToolsProtocol):
    """One connection, which gives its place back when it ends.

    llhttp reads requests in a fifth of h11's time, and uvicorn puts no bounds on their heads: these do.
    """

    def __init__(self, doorstep: "Doorstep") -> None:
        super().__init__(doorstep.config, doorstep.state, {})
        self._doorstep = doorstep
        self._waiting: asyncio.TimerHandle | None = None
        self._heading = True  # what comes is the head of a request
        self._head = self._lines = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._head += len(data) if self._heading else 0
        super().data_received(data)
        if self._heading and self._head > HEAD_BYTES:
            self.send_400_response("The head of the request is too large.")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += 1
        if self._lines > _HEADERS:
            raise ValueError("too many headers")  # llhttp stops, and uvicorn answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._heading, self._head, self._lines = False, 0, 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._heading = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        self._doorstep.left(self)

    def _wait(self) -> None:
        """The head of a request has so much time to come, however slowly its bytes do."""
        self._stop_waiting()
        if self.cycle is None or self.cycle.response_complete:
            self._waiting = self.loop.call_later(self._doorstep.idle_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()


class Doorstep:
    """Serves an application on a listening socket, from construction until `aclose`.

    Args:
        app: what answers.
        listener: owned from here on.
        connections: at a time.
        idle_s: seconds that a connection may be without a request.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        connections: int = CONNECTIONS,
        idle_s: float = IDLE_S,
    ) -> None:
        self.idle_s = idle_s
        self.config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=math.ceil(idle_s) + 1,  # after ours
        )
        self.config.load()
        self.state = ServerState()
        self._listener = listener
        listener.setblocking(False)
        self._slots = asyncio.Semaphore(connections)
        self._open: set[_Connection] = set()
        self._accepting = asyncio.create_task(self._accept())

    @property
    def port(self) -> int:
        """Where it listens, on loopback."""
        return cast(int, self._listener.getsockname()[1])

    def left(self, connection: _Connection) -> None:
        """A connection has ended."""
        if connection in self._open:
            self._open.remove(connection)
            self._slots.release()

    async def aclose(self) -> None:
        """Close the socket and every connection; what is being answered ends. Idempotent."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        for connection in list(self._open):
            connection.transport.abort()
        while self.state.tasks:  # they learn that their clients have left
            await asyncio.wait(set(self.state.tasks))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                client = await _accepted(self._listener)
            except OSError as error:  # no descriptors or no memory, or the client has gone
                log.warning("a sandbox's model endpoint cannot accept: %s", error)
                self._slots.release()
                await asyncio.sleep(_RETRY_S)
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(self)
            self._open.add(connection)
            try:
                await loop.connect_accepted_socket(lambda c=connection: c, client)  # type: ignore[misc]
            except OSError:
                self.left(connection)
                client.close()


async def _accepted(listener: socket.socket) -> socket.socket:
    """The next client. The loop's own `sock_accept` loses one that comes as it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(BlockingIOError):
            client, _ = listener.accept()
            client.setblocking(False)
            return client
        ready = asyncio.Event()
        loop.add_reader(listener, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(listener)
