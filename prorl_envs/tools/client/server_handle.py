"""Handle of a sandbox's tool server: starts the server on demand, and again after a loss."""

import asyncio
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prorl_envs.errors import InputError, ToolError
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools.client.connection import ServerLost, ToolConnection
from prorl_envs.tools.client.results import server_lost
from prorl_envs.tools.protocol.messages import BashDone, PythonDone, Reply, Request, Setup
from prorl_envs.tools.types import ToolResult

ENTRY = "prorl_envs.tools.server.server:serve"
#: Variables of all processes of the tools. The sandbox's own variables take precedence. No user can operate a
#: pager, and the model reads no colours.
ENVIRONMENT = {"PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "TERM": "dumb"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Bounds of one toolbox.

    Args:
        output_bytes: bytes of output kept of each tool call; half from its start, half from its end.
        grace_s: seconds a command has to react to an interrupt before it is killed.
        margin_s: seconds beyond a call's own timeout after which the connection to the server is closed.
        transfer_s: timeout of reading, writing or editing a file, in seconds.
    """

    output_bytes: int = 32 * 1024
    grace_s: float = 2.0
    margin_s: float = 15.0
    transfer_s: float = 60.0


class ToolServerHandle:
    """Tool server that is forked at first use, and again if it is lost."""

    def __init__(self, sandbox: Sandbox, template: str, limits: ToolLimits, *, python: bool) -> None:
        self.sandbox = sandbox
        self._template = template
        self.limits = limits
        self._python = python
        self._connection: ToolConnection | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    @property
    def live(self) -> ToolConnection | None:
        """The live connection, or None."""
        connection = self._connection
        return None if connection is None or connection.lost else connection

    async def connection(self) -> ToolConnection:
        """Return the live connection; create one if there is none.

        Raises:
            SandboxError: the sandbox has stopped.
            ToolError: the toolbox is closed, or a new server cannot be set up.
        """
        if (connection := self.live) is not None:
            return connection
        if self._closed:
            raise ToolError("the toolbox is closed")
        if not self.sandbox.alive:
            raise self.sandbox.end_error()
        async with self._starting:
            if self.live is None:
                self._connection = await self._start()
            assert self._connection is not None
            return self._connection

    async def ask[R: Reply](
        self,
        make: Callable[[int], Request],
        reply_type: type[R],
        *,
        timeout_s: float,
        connection: ToolConnection | None = None,
    ) -> R:
        """Send a request and await its reply; see `ToolConnection.request`.

        Args:
            timeout_s: seconds the request itself may take; the server gets `limits.margin_s` more.
            connection: the connection to use; None uses the live one.

        Raises:
            OSError: the server refused the request with this error.
            SandboxError: the sandbox has stopped.
            ToolError: the server was lost or broke the protocol.
        """
        connection = connection or await self.connection()
        try:
            return await connection.request(make, reply_type, deadline_s=timeout_s + self.limits.margin_s)
        except (ServerLost, OSError) as error:
            if not self.sandbox.alive:
                raise self.sandbox.end_error() from error
            raise

    async def aclose(self) -> None:
        """Close the connection; the server then kills its commands and exits. Idempotent."""
        self._closed = True
        if self._connection is not None:
            await self._connection.aclose()

    async def _start(self) -> ToolConnection:
        connection = ToolConnection(self._spawn, self._setup)
        if self._python:  # the server starts the Python session
            try:
                await connection.start(deadline_s=self.limits.margin_s)
            except BaseException:
                await connection.aclose()
                raise
        return connection

    async def _spawn(self) -> socket.socket:
        return await self.sandbox.spawn(ENTRY, template=self._template)

    def _setup(self, request_id: int) -> Setup:
        return Setup(
            request_id,
            self.sandbox.spec.workdir,
            {**ENVIRONMENT, **self.sandbox.spec.env},
            self.limits.output_bytes,
            self.limits.grace_s,
            self._python,
        )


@dataclass(slots=True)
class ToolServerSession:
    """State of one session; its lock keeps the session's calls in order.

    Args:
        server: the server that has the session.
        kind: name of the session for the model and in errors, such as "shell".
        connection: the connection of the last call; None before the first call, and after the model was
            notified of a loss.
    """

    server: ToolServerHandle
    kind: str
    connection: ToolConnection | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def call[R: BashDone | PythonDone](
        self,
        make: Callable[[int], Request],
        reply_type: type[R],
        convert: Callable[[R, str, float], ToolResult],
        *,
        timeout_s: float,
    ) -> ToolResult:
        """Run a request of this session. If the server is lost, the result says so.

        Args:
            convert: converts the reply; see `bash_result` for its arguments.

        Raises:
            SandboxError: the sandbox has stopped.
            ToolError: the session could not be started, or the server broke the protocol.
        """
        started = time.monotonic()
        async with self.lock:
            connection = await self.server.connection()
            renewed = self.kind if self.connection not in (None, connection) else ""
            self.connection = connection
            try:
                done = await self.server.ask(make, reply_type, timeout_s=timeout_s, connection=connection)
            except ServerLost as error:
                self.connection = None
                return server_lost(error, self.kind, time.monotonic() - started)
            except OSError as error:
                raise ToolError(f"no {self.kind} could be started: {error}") from error
        if done.notice and not self.server.sandbox.alive:
            raise self.server.sandbox.end_error()
        return convert(done, renewed, time.monotonic() - started)


def check_timeout(timeout_s: float) -> None:
    """Check that a timeout is a positive number of seconds.

    Raises:
        InputError: the timeout is invalid.
    """
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InputError(f"timeout_s is {timeout_s}; it must be a positive number of seconds")
