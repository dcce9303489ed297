"""Connection to a sandbox's tool server: starts it, sends requests, matches replies to them."""

import asyncio
import contextlib
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import count

from prorl_envs.errors import ToolError
from prorl_envs.sandbox.base import CheckpointingSandbox, Sandbox
from prorl_envs.tools.client.results import server_lost
from prorl_envs.tools.protocol.messages import (
    MEMORY_FD,
    AnyReply,
    BashDone,
    Cancel,
    Done,
    Framer,
    ListSessions,
    PythonDone,
    Reply,
    Request,
    SessionPids,
    Setup,
    ToolRefused,
    WireError,
    decode_reply,
    encode,
)
from prorl_envs.tools.types import ToolResult

ENTRY = "prorl_envs.tools.server.server:serve"
#: Variables of all processes of the tools. The sandbox's own variables take precedence. No user can operate a
#: pager, and the model reads no colours.
ENVIRONMENT = {"PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "TERM": "dumb"}
#: Maximum number of requests in flight.
IN_FLIGHT_LIMIT = 256
#: Seconds to wait for a server's setup before the server is given up.
_SETUP_S = 15.0
#: Bytes received at a time. It is below the size at which `malloc` requests memory from the kernel.
_RECEIVE_SIZE = 65536


class ServerLost(ToolError):
    """The server stopped, or was given up, before or during a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Bounds of one toolbox.

    Args:
        output_bytes: bytes of output kept of each tool call; half from its start, half from its end.
        grace_s: seconds a command has to react to an interrupt before it is killed.
        margin_s: seconds beyond a call's own timeout after which the server is given up.
        transfer_s: timeout of reading, writing or editing a file, in seconds.
    """

    output_bytes: int = 32 * 1024
    grace_s: float = 5.0
    margin_s: float = 15.0
    transfer_s: float = 60.0


@dataclass(slots=True, eq=False)
class _Waiting:
    """Request in flight."""

    future: asyncio.Future[AnyReply]
    due: float
    deadline_s: float


@dataclass(slots=True)
class _Session:
    """Session of the model; its lock keeps its calls in order.

    Args:
        server: number of the server of the last call; 0 before the first call, and after the model was
            notified of a loss.
    """

    server: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ToolConnection:
    """Connection to a tool server, which is forked at first use, and again if it is lost.

    Belongs to one event loop; everything received is untrusted.

    Args:
        sandbox: the sandbox in which the server runs.
        limits: bounds of the server's outputs and times.
        python: start the server with a Python session, and for nothing else: its memory is copied to the
            session.
    """

    def __init__(self, sandbox: Sandbox, limits: ToolLimits, *, python: bool = False) -> None:
        self.sandbox = sandbox
        self.limits = limits
        self._python = python
        self._loop = asyncio.get_running_loop()
        self._starting = asyncio.Lock()
        self._closed = False
        #: Number of servers started so far, and the last one's socket; None once it is lost.
        self._servers = 0
        self._sock: socket.socket | None = None
        self._reason = "the tool server ended"
        self._framer = Framer()
        self._unsent = bytearray()
        self._ids = count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._deadline: asyncio.TimerHandle | None = None
        self._sessions: defaultdict[str, _Session] = defaultdict(_Session)

    async def start(self) -> None:
        """Start a server, unless one runs.

        Raises:
            SandboxError: the sandbox has stopped.
            ToolError: the toolbox is closed, or the server cannot be set up.
        """
        async with self._starting:
            if self._sock is not None:
                return
            if self._closed:
                raise ToolError("the toolbox is closed")
            if not self.sandbox.alive:
                raise self.sandbox.end_error()
            try:
                sock = await self.sandbox.spawn(ENTRY, template="ipython" if self._python else "base")
            except OSError as error:
                raise ToolError(f"the tool server cannot be started: {error}") from error
            self._take_over(sock)
            if self._closed:  # meanwhile
                await self.aclose()
            # Not awaited, so that the first call is sent at once. If the setup fails, that call fails.
            setup = self._send(self._setup, _SETUP_S)[1]
            setup.add_done_callback(self._on_setup)
            if self._python:  # the server starts the Python session
                await setup
                self._check_connected()
                await self._restore_memory()

    async def _restore_memory(self) -> None:
        """Give the first Python session the memory of the sandbox's checkpoint."""
        checkpoint = self.sandbox.spec.checkpoint
        if checkpoint is None or checkpoint.memory is None or self._servers > 1:
            return
        python = (await self.sessions()).python
        assert isinstance(self.sandbox, CheckpointingSandbox) and python is not None
        await self.sandbox.restore_memory(python, file=MEMORY_FD)

    async def sessions(self) -> SessionPids:
        """Return the processes of the sessions.

        Raises:
            SandboxError, ToolError: see `ask`.
        """
        if self._sock is None:
            return SessionPids(0, {}, None)
        return await self.ask(ListSessions, SessionPids, timeout_s=_SETUP_S)

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Wait until no session runs a call, and let none begin."""
        async with contextlib.AsyncExitStack() as held:
            for session in tuple(self._sessions.values()):
                await held.enter_async_context(session.lock)
            yield

    async def call[R: BashDone | PythonDone](
        self,
        session: str,
        kind: str,
        make: Callable[[int], Request],
        reply_type: type[R],
        convert: Callable[[R, str, float], ToolResult],
        *,
        timeout_s: float,
    ) -> ToolResult:
        """Run a request of a session after the session's other calls. If the server is lost, the result says
        so.

        Args:
            session: name of the session.
            kind: what the model and errors call it, such as "shell".
            make, reply_type, timeout_s: see `ask`.
            convert: converts the reply; see `bash_result` for its arguments.

        Raises:
            SandboxError: the sandbox has stopped.
            ToolError: the session could not be started, or the server broke the protocol.
        """
        started = time.monotonic()
        state = self._sessions[session]
        async with state.lock:
            if self._sock is None:
                await self.start()
            renewed = kind if state.server not in (0, self._servers) else ""
            state.server = self._servers
            try:
                done = await self.ask(make, reply_type, timeout_s=timeout_s)
            except ServerLost as error:
                state.server = 0
                return server_lost(error.message, kind, time.monotonic() - started)
            except OSError as error:
                raise ToolError(f"no {kind} could be started: {error}") from error
        if done.notice and not self.sandbox.alive:
            raise self.sandbox.end_error()
        return convert(done, renewed, time.monotonic() - started)

    async def ask[R: Reply](
        self, make: Callable[[int], Request], reply_type: type[R], *, timeout_s: float
    ) -> R:
        """Send a request and await its reply.

        Cancelling the caller cancels the request in the server; the connection stays usable.

        Args:
            make: builds the request, given its id.
            timeout_s: seconds the request itself may take; the server gets `limits.margin_s` more.

        Raises:
            OSError: the server refused the request with this error.
            SandboxError: the sandbox has stopped.
            ServerLost: the server has stopped, or did not answer in time.
            ToolError: the server cannot be started or broke the protocol, or too many requests are in flight.
        """
        if self._sock is None:
            await self.start()
        request, future = self._send(make, timeout_s + self.limits.margin_s)
        try:
            reply = await future
            if isinstance(reply, ToolRefused):
                raise OSError(reply.errno, reply.message)
        except asyncio.CancelledError:
            # The reply still arrives, finds the future cancelled, and is dropped.
            if request.id in self._waiting:
                self._transmit(encode(Cancel(request.id)))
            raise
        except (ServerLost, OSError) as error:
            if not self.sandbox.alive:
                raise self.sandbox.end_error() from error
            raise
        if isinstance(reply, reply_type):
            return reply
        self.give_up(f"the tool server answered {type(reply).__name__}, not {reply_type.__name__}")
        raise ToolError(self._reason)

    def give_up(self, reason: str) -> None:
        """Disconnect from the server; it kills its commands and exits. Fail every request in flight."""
        if self._sock is None:
            return
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._sock, self._reason = None, reason
        if self._deadline is not None:
            self._deadline.cancel()
        waiting, self._waiting, self._deadline = self._waiting, {}, None
        for each in waiting.values():
            if not each.future.done():
                each.future.set_exception(ServerLost(reason))

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        self._closed = True
        self.give_up("the toolbox was closed")

    def _check_connected(self) -> None:
        if self._sock is None:
            raise ServerLost(self._reason)

    def _setup(self, request_id: int) -> Setup:
        return Setup(
            request_id,
            self.sandbox.spec.workdir,
            {**ENVIRONMENT, **self.sandbox.spec.env},
            self.limits.output_bytes,
            self.limits.grace_s,
            self._python,
        )

    def _on_setup(self, future: asyncio.Future[AnyReply]) -> None:
        if future.cancelled() or future.exception() is not None or isinstance(reply := future.result(), Done):
            return
        cause = reply.message if isinstance(reply, ToolRefused) else f"it answered {type(reply).__name__}"
        self.give_up(f"the tool server could not be set up: {cause}")

    def _send(
        self, make: Callable[[int], Request], deadline_s: float
    ) -> tuple[Request, asyncio.Future[AnyReply]]:
        self._check_connected()
        if len(self._waiting) >= IN_FLIGHT_LIMIT:
            raise ToolError(f"{IN_FLIGHT_LIMIT} requests are under way on this toolbox already")
        request = make(next(self._ids))
        try:
            frame = encode(request)
        except WireError as error:
            raise ToolError(str(error), hint="send less at a time") from error
        future: asyncio.Future[AnyReply] = self._loop.create_future()
        due = self._loop.time() + deadline_s
        self._waiting[request.id] = _Waiting(future, due, deadline_s)
        self._transmit(frame)
        # One timer serves all requests and is rarely reset, because a timer per request would cost as much as
        # sending the request.
        if self._deadline is None or self._deadline.when() > due:
            self._watch_deadline(due)
        return request, future

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

    def _take_over(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock, self._reason = sock, "the tool server ended"
        self._servers += 1
        self._framer, self._unsent = Framer(), bytearray()
        self._loop.add_reader(sock, self._on_readable)

    def _transmit(self, frame: bytearray) -> None:
        assert self._sock is not None
        if self._unsent:
            self._unsent += frame
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
