"""The endpoint on a socket that listens in a sandbox. Clients are hostile: connections are bounded.

The socket was made in the sandbox's network namespace; whoever accepts on it is here, outside. So nothing is
relayed, and nothing of the endpoint runs inside.
"""

import asyncio
import logging
import socket
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

log = logging.getLogger(__name__)

#: Connections of one sandbox at a time; further ones wait in the kernel's queue.
CONNECTIONS = 64
#: Seconds that a connection may idle before its first request, and between two.
_IDLE_S = 30
_RETRY_S = 0.2


class _Connection(H11Protocol):
    """One connection, which gives its place back when it ends."""

    def __init__(self, doorstep: "Doorstep") -> None:
        super().__init__(doorstep.config, doorstep.state, {})
        self._doorstep = doorstep
        self._first: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._first = self.loop.call_later(_IDLE_S, transport.abort)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and self._first is not None:
            self._first.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._first is not None:
            self._first.cancel()
        super().connection_lost(exc)
        self._doorstep.left(self)


class Doorstep:
    """Serves an application on a listening socket, from construction until `aclose`.

    Args:
        app: what answers.
        listener: owned from here on.
        connections: at a time.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket, *, connections: int = CONNECTIONS) -> None:
        self.config = uvicorn.Config(
            app,
            http="h11",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_IDLE_S,
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
                client, _ = await loop.sock_accept(self._listener)
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
