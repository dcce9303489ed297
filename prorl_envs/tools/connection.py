"""One connection to a tool server, seen from the host: requests out, replies matched to them."""

import asyncio
import socket
from collections.abc import Callable
from itertools import count
from typing import Self, cast

from prorl_envs.errors import ToolError
from prorl_envs.tools.wire import (
    AnyReply,
    Cancel,
    Framer,
    Refused,
    Reply,
    Request,
    WireError,
    decode_reply,
    encode,
)

#: Requests that may be under way at a time.
IN_FLIGHT_LIMIT = 256


class ServerLost(ToolError):
    """The server ended, or was given up, while a request was under way or before it."""


class Connection(asyncio.Protocol):
    """Made by `open`; belongs to one event loop. Everything received is taken as hostile."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._framer = Framer()
        self._waiting: dict[int, asyncio.Future[AnyReply]] = {}
        self._transport: asyncio.Transport | None = None
        self._why = "the tool server ended"
        self._closed = asyncio.Event()

    @classmethod
    async def open(cls, sock: socket.socket) -> Self:
        """Take over a connected stream socket."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(cls, sock=sock)
        return connection

    @property
    def lost(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._transport is None or self._transport.is_closing()

    async def request[R: Reply](
        self, make: Callable[[int], Request], reply_type: type[R], *, deadline_s: float
    ) -> R:
        """Send a request and await its reply.

        Cancelling the caller cancels the request in the server; the connection stays usable.

        Args:
            make: builds the request, given its id.
            deadline_s: seconds after which the server itself is given up.

        Raises:
            OSError: the server refused the request with this error.
            ServerLost: the server has ended, or did not answer in time.
            ToolError: the server answered something else, or too many requests are under way.
        """
        reply = await self._exchange(make, deadline_s)
        if isinstance(reply, Refused):
            raise OSError(reply.errno, reply.message)
        if not isinstance(reply, reply_type):
            self.give_up(f"the tool server answered {type(reply).__name__}, not {reply_type.__name__}")
            raise ToolError(self._why)
        return reply

    def give_up(self, why: str) -> None:
        """Close at once; every request under way fails with `ServerLost`."""
        if not self.lost:
            self._why = why
            cast(asyncio.Transport, self._transport).abort()

    async def aclose(self) -> None:
        """Close and wait until the socket is."""
        self.give_up("the toolbox was closed")
        if self._transport is not None:
            await self._closed.wait()

    async def _exchange(self, make: Callable[[int], Request], deadline_s: float) -> AnyReply:
        if self.lost or self._transport is None:
            raise ServerLost(self._why)
        if len(self._waiting) >= IN_FLIGHT_LIMIT:
            raise ToolError(f"{IN_FLIGHT_LIMIT} requests are under way on this toolbox already")
        request = make(next(self._ids))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[AnyReply] = loop.create_future()
        self._waiting[request.id] = future
        self._send(request)
        deadline = loop.call_later(
            deadline_s, self.give_up, f"the tool server did not answer within {deadline_s:g} s"
        )
        try:
            return await future
        except asyncio.CancelledError:
            # Its reply still comes, finds the future cancelled and ends the matter.
            if not self.lost:
                self._send(Cancel(request.id))
            raise
        finally:
            deadline.cancel()

    def _send(self, request: Request) -> None:
        try:
            frame = encode(request)
        except WireError as error:
            del self._waiting[request.id]
            raise ToolError(str(error), hint="send less at a time") from error
        cast(asyncio.Transport, self._transport).write(frame)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            replies = [decode_reply(frame) for frame in self._framer.feed(data)]
        except WireError as error:
            self.give_up(f"the tool server broke the protocol: {error}")
            return
        for reply in replies:
            future = self._waiting.pop(reply.id, None)
            if future is None:
                self.give_up("the tool server broke the protocol: a reply to no request")
                return
            if not future.done():
                future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ServerLost(self._why))
        self._waiting.clear()
        self._closed.set()
