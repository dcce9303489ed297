"""Host end of one connection to a tool server: sends requests and matches replies to them."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Self

from prorl_envs.errors import RolloutFailure, ToolError
from prorl_envs.tools.protocol.messages import (
    AnyReply,
    Cancel,
    Done,
    Framer,
    Reply,
    Request,
    Setup,
    ToolRefused,
    WireError,
    decode_reply,
    encode,
)

#: Maximum number of requests in flight.
IN_FLIGHT_LIMIT = 256
#: Seconds to wait for a server's setup before the connection is closed.
_SETUP_S = 15.0
#: Bytes received at a time. It is below the size at which `malloc` requests memory from the kernel.
_RECEIVE_SIZE = 65536


class ServerLost(ToolError):
    """The server stopped, or its connection was closed, before or during a request."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """Request in flight."""

    future: asyncio.Future[AnyReply]
    due: float
    deadline_s: float


class ToolConnection:
    """Connection to a tool server. Belongs to one event loop; everything received is untrusted.

    Args:
        spawn: starts a server on demand; this connection owns the returned socket.
        setup: builds the first request to the server, given its id.
    """

    def __init__(
        self,
        spawn: Callable[[], Awaitable[socket.socket]] | None = None,
        setup: Callable[[int], Setup] | None = None,
    ) -> None:
        self._sock: socket.socket | None = None
        self._spawn, self._setup = spawn, setup
        self._starting: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._ids = count(1)
        self._framer = Framer()
        self._unsent = bytearray()
        self._waiting: dict[int, _Waiting] = {}
        self._deadline: asyncio.TimerHandle | None = None
        self._reason = "the tool server ended"
        #: True once no more requests can be sent.
        self.lost = False

    @classmethod
    async def open(cls, sock: socket.socket) -> Self:
        """Create a connection that owns a connected stream socket."""
        connection = cls()
        connection._take_over(sock)
        return connection

    async def start(self, *, deadline_s: float) -> None:
        """Start a server and wait for its setup.

        Raises:
            OSError, SandboxError, ToolError: the server cannot be started or set up.
        """
        assert self._spawn is not None and self._setup is not None
        self._take_over(await self._spawn())
        await self.request(self._setup, Done, deadline_s=deadline_s)

    async def request[R: Reply](
        self, make: Callable[[int], Request], reply_type: type[R], *, deadline_s: float
    ) -> R:
        """Send a request and await its reply.

        Cancelling the caller cancels the request in the server; the connection stays usable.

        Args:
            make: builds the request, given its id.
            deadline_s: seconds after which the connection to the server is closed.

        Raises:
            OSError: the server refused the request with this error.
            ServerLost: the server has stopped, or did not answer in time.
            ToolError: the server sent an unexpected reply, or too many requests are in flight.
        """
        request, future = self._ask(make, deadline_s)
        try:
            reply = await future
        except asyncio.CancelledError:
            # The reply still arrives, finds the future cancelled, and is dropped.
            if not self.lost:
                self._send(Cancel(request.id))
            raise
        if isinstance(reply, reply_type):
            return reply
        if isinstance(reply, ToolRefused):
            raise OSError(reply.errno, reply.message)
        self.give_up(f"the tool server answered {type(reply).__name__}, not {reply_type.__name__}")
        raise ToolError(self._reason)

    def _on_setup_done(self, future: asyncio.Future[AnyReply]) -> None:
        if future.exception() is None and not isinstance(reply := future.result(), Done):
            cause = reply.message if isinstance(reply, ToolRefused) else f"it answered {type(reply).__name__}"
            self.give_up(f"the tool server could not be set up: {cause}")

    def _ask(
        self, make: Callable[[int], Request], deadline_s: float
    ) -> tuple[Request, asyncio.Future[AnyReply]]:
        if self.lost:
            raise ServerLost(self._reason)
        if len(self._waiting) >= IN_FLIGHT_LIMIT:
            raise ToolError(f"{IN_FLIGHT_LIMIT} requests are under way on this toolbox already")
        request = make(next(self._ids))
        future: asyncio.Future[AnyReply] = self._loop.create_future()
        due = self._loop.time() + deadline_s
        self._waiting[request.id] = _Waiting(future, due, deadline_s)
        self._send(request)
        # One timer serves all requests and is rarely reset, because a timer per request would cost as much as
        # sending the request.
        if self._deadline is None or self._deadline.when() > due:
            self._watch_deadline(due)
        return request, future

    def give_up(self, reason: str, error: Exception | None = None) -> None:
        """Close at once; fail every request in flight with `error`, or `ServerLost` if there is none."""
        if self.lost:
            return
        self.lost, self._reason = True, reason
        self._spawn = self._setup = None  # breaks the reference cycle with the owner
        if self._sock is not None:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
        if self._starting is not None:
            self._starting.cancel()
        if self._deadline is not None:
            self._deadline.cancel()
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(error or ServerLost(reason))
        self._waiting.clear()

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        self.give_up("the toolbox was closed")

    def _watch_deadline(self, due: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_at(due, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline = None
        first = min(self._waiting.values(), key=lambda waiting: waiting.due, default=None)
        if first is None:
            return
        if first.due <= self._loop.time():
            self.give_up(f"the tool server did not answer within {first.deadline_s:g} s")
        else:
            self._watch_deadline(first.due)

    def _send(self, request: Request) -> None:
        try:
            frame = encode(request)
        except WireError as error:
            del self._waiting[request.id]
            raise ToolError(str(error), hint="send less at a time") from error
        if self._unsent or self._sock is None:
            self._unsent += frame
            self._ensure_server()
            return
        sent = self._write(self._sock, frame)
        if sent < len(frame):
            self._unsent += frame[sent:]
            self._loop.add_writer(self._sock, self._on_writable)

    def _on_writable(self) -> None:
        assert self._sock is not None
        del self._unsent[: self._write(self._sock, self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._sock)

    def _write(self, sock: socket.socket, data: bytearray) -> int:
        try:
            return sock.send(data)
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):  # `_on_readable` finds the end of the stream
            return len(data)

    def _ensure_server(self) -> None:
        """Start a server for the unsent requests, unless one runs or is starting."""
        if self._sock is None and self._starting is None:
            self._starting = self._loop.create_task(self._start_server())

    async def _start_server(self) -> None:
        assert self._spawn is not None and self._setup is not None
        try:
            sock = await self._spawn()
            self._take_over(sock)
            unsent, self._unsent = self._unsent, bytearray()
            # Not awaited, so that the first call is sent at once. If the setup fails, that call fails.
            self._ask(self._setup, _SETUP_S)[1].add_done_callback(self._on_setup_done)
        except (RolloutFailure, OSError) as error:
            self._starting = None
            self.give_up(str(error), error)
            return
        self._unsent += unsent
        self._loop.add_writer(sock, self._on_writable)

    def _take_over(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop.add_reader(sock, self._on_readable)

    def _on_readable(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(_RECEIVE_SIZE)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self.give_up(self._reason)
            return
        try:
            for reply in [decode_reply(frame) for frame in self._framer.feed(data)]:
                self._take(reply)
        except WireError as error:
            self.give_up(f"the tool server broke the protocol: {error}")

    def _take(self, reply: AnyReply) -> None:
        """Pass a reply to its request.

        Raises:
            WireError: the reply matches no request in flight.
        """
        waiting = self._waiting.pop(reply.id, None)
        if waiting is None:
            raise WireError("a reply without a request")
        if not waiting.future.done():
            waiting.future.set_result(reply)
