"""Interactive session in a sandbox, with the interface of NeMo Gym 0.7. Imports nothing of NeMo Gym."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self, cast, get_args

from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools.protocol.messages import Framer, WireError, encode
from prorl_envs.tools.protocol.terminal import (
    SESSION_FRAME_LIMIT,
    Exited,
    Open,
    Output,
    Resize,
    SendSignal,
    Signal,
    ToSession,
    decode_from_session,
    input_frames,
)

ENTRY = "prorl_envs.tools.server.interactive:serve"
SIGNALS: tuple[str, ...] = get_args(Signal.__value__)
#: Bytes of unread output above which no more is received, so that the program blocks.
_BUFFER_LIMIT = 4 * 1024 * 1024


class TerminalSession(asyncio.Protocol):
    """Program on a terminal, or with pipes. Created by `open`; closed by `close`, by the exit of its program,
    or with the sandbox. An async context manager, and an iterator over its output.

    Everything received is treated as hostile. Too much unread output, or stderr in pipe mode, blocks the
    program.
    """

    def __init__(self, session_id: str, mode: str, error: type[Exception]) -> None:
        self.session_id = session_id
        self.mode: str | None = mode
        self._error = error
        self._framer = Framer(SESSION_FRAME_LIMIT)
        self._output, self._errors = _Stream(), _Stream()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._disconnected = asyncio.Event()
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._closed = False

    @classmethod
    async def open(cls, sandbox: Sandbox, request: Open, *, error: type[Exception]) -> Self:
        """Start a program in a running sandbox.

        Args:
            request: program, directory, variables and terminal.
            error: class of the errors that the session's methods raise.

        Raises:
            SandboxError: the sandbox is closed or cannot be joined.
        """
        sock = await sandbox.spawn(ENTRY)
        session_id = f"{sandbox.id}-{sock.fileno()}"
        loop = asyncio.get_running_loop()
        try:
            _, session = await loop.create_unix_connection(
                lambda: cls(session_id, "pty" if request.terminal else "pipe", error), sock=sock
            )
        except BaseException:
            sock.close()
            raise
        session._send(request)
        return session

    @property
    def closed(self) -> bool:
        """True if the session is over."""
        return self._closed or self._exit.done()

    async def read(self, *, timeout_s: float | None = None) -> bytes:
        """Return the output since the last call, at least one byte; empty after the program has exited.

        Raises:
            TimeoutError: no output in time.
            SandboxPtyError: the session was closed before its program exited.
        """
        return await self._read(self._output, timeout_s)

    async def read_stderr(self, *, timeout_s: float | None = None) -> bytes:
        """Return the stderr output since the last call; only pipe mode separates stderr."""
        return await self._read(self._errors, timeout_s)

    async def write(self, data: bytes) -> None:
        """Write to the program's input.

        Raises:
            SandboxPtyError: the session is closed.
        """
        for frame in input_frames(data):
            self._send(frame)
            await self._writable.wait()

    async def resize(self, rows: int, cols: int) -> None:
        """Change the terminal's size."""
        self._send(Resize(rows, cols))

    async def send_signal(self, signal: str) -> None:
        """Send a signal to the program's process group, on a terminal also to the foreground process group.

        Raises:
            ValueError: `signal` is not one of SIGNALS.
        """
        if signal not in SIGNALS:
            raise ValueError(f"signal {signal!r} cannot be sent; known: {', '.join(SIGNALS)}")
        self._send(SendSignal(cast(Signal, signal)))

    async def wait_exit(self, *, timeout_s: float | None = None) -> int:
        """Wait for the program's exit status, 128 and more for a signal.

        Raises:
            TimeoutError: the program did not exit in time.
            SandboxPtyError: the session was closed before the program exited.
        """
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._exit)

    async def close(self) -> None:
        """Kill the program and close the session. Idempotent."""
        self._closed = True
        self._end("the session was closed")
        await self._disconnected.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self.read():
            yield chunk

    async def _read(self, stream: "_Stream", timeout_s: float | None) -> bytes:
        async with asyncio.timeout(timeout_s):
            await stream.ready.wait()
        data = stream.take()
        if self._transport is not None and not self._full():
            self._transport.resume_reading()
        if not data:
            self._exit.result()
        return data

    def _full(self) -> bool:
        return len(self._output.data) + len(self._errors.data) > _BUFFER_LIMIT

    def _send(self, message: ToSession) -> None:
        if self.closed or self._transport is None or self._transport.is_closing():
            raise self._error("the session is over")
        self._transport.write(encode(message))

    def _end(self, reason: str) -> None:
        if not self._exit.done():
            self._exit.set_exception(self._error(reason))
            self._exit.exception()  # marks it as retrieved: asyncio warns otherwise if no task waits
        self._finish()

    def _finish(self) -> None:
        for stream in (self._output, self._errors):
            stream.end()
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()

    # Callbacks of asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            messages: list[Any] = [decode_from_session(frame) for frame in self._framer.feed(data)]
        except WireError as error:
            self._end(f"the session broke the protocol: {error}")
            return
        for message in messages:
            self._handle(message)
        if self._full() and self._transport is not None:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the session's process ended")
        self._disconnected.set()

    def _handle(self, message: Output | Exited) -> None:
        if self._exit.done():
            return
        match message:
            case Output(data, errors):
                (self._errors if errors else self._output).feed(data)
            case Exited(status, ""):
                self._exit.set_result(status if status >= 0 else 128 - status)
                self._finish()
            case Exited(_, failure):
                self._end(f"the program cannot be started: {failure}")


class _Stream:
    """Buffer of unread output."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ready = asyncio.Event()
        self._ended = False

    def feed(self, data: bytes) -> None:
        self.data += data
        self.ready.set()

    def end(self) -> None:
        self._ended = True
        self.ready.set()

    def take(self) -> bytes:
        data = bytes(self.data)
        self.data.clear()
        if not self._ended:
            self.ready.clear()
        return data
