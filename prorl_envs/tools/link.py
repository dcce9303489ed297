"""A sandbox's tool server as its users know it: there when it is needed, and again when it was lost."""

import asyncio
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from prorl_envs.errors import InputError, ToolError
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools import born
from prorl_envs.tools.connection import Connection, ServerLost
from prorl_envs.tools.wire import Reply, Request, Setup

ENTRY = "prorl_envs.tools.server:serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """The bounds of one toolbox.

    Args:
        output_bytes: bytes of output kept of each tool call; half from its beginning, half from its end.
        grace_s: seconds a command has to obey an interrupt before it is killed.
        margin_s: seconds beyond a call's own timeout after which the tool server itself is given up.
        transfer_s: seconds for moving a file.
    """

    output_bytes: int = 32 * 1024
    grace_s: float = 2.0
    margin_s: float = 15.0
    transfer_s: float = 60.0


@dataclass(slots=True)
class Session:
    """Keeps the calls of one session in order.

    Args:
        server: the connection it last used; None where there was none, or the model knows of its loss.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    server: Connection | None = None


class ServerLink:
    """A tool server that is forked at first use and again whenever it is found lost."""

    def __init__(self, sandbox: Sandbox, template: str, limits: ToolLimits, *, python: bool) -> None:
        self.sandbox = sandbox
        self._template = template
        self.limits = limits
        self._python = python
        self._connection: Connection | None = None
        self._starting = asyncio.Lock()
        self._asked_for_shell = False
        self._closed = False

    @property
    def live(self) -> Connection | None:
        """The connection, where there is one."""
        connection = self._connection
        return None if connection is None or connection.lost else connection

    async def connection(self) -> Connection:
        """The live connection, made where there is none.

        Raises:
            SandboxError: the sandbox has ended.
            ToolError: the toolbox is closed, or a new server cannot be set up.
        """
        if (connection := self.live) is not None:
            return connection
        if self._closed:
            raise ToolError("the toolbox is closed")
        if not self.sandbox.alive:
            raise self.sandbox.ended()
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
        connection: Connection | None = None,
    ) -> R:
        """Send a request and await its reply; see `Connection.request`.

        Args:
            timeout_s: seconds the request itself may take; the server gets `limits.margin_s` more.
            connection: the one to use, where the caller must know which.

        Raises:
            OSError: the server refused the request with this error.
            SandboxError: the sandbox has ended.
            ToolError: the server was lost or broke the protocol.
        """
        connection = connection or await self.connection()
        try:
            return await connection.request(make, reply_type, deadline_s=timeout_s + self.limits.margin_s)
        except (ServerLost, OSError) as error:
            if not self.sandbox.alive:
                raise self.sandbox.ended() from error
            raise

    async def aclose(self) -> None:
        """Close the connection; the server ends itself and its commands. Idempotent."""
        self._closed = True
        if self._connection is not None:
            await self._connection.aclose()

    async def shell_connection(self, session: str) -> Connection:
        """The live connection, for a command in a session's shell: one that was begun without a server, where
        there is one to be had.

        Raises:
            SandboxError: the sandbox has ended.
            ToolError: the toolbox is closed, or a new server cannot be set up.
        """
        connection = await self.connection()
        if session == born.SESSION and not self._asked_for_shell:
            self._asked_for_shell = True
            begun = await self.sandbox.begin_shell()
            if begun is not None:
                workdir, settings = self.sandbox.spec.workdir, born.terminal_settings()
                connection.borrow(session, begun, cwd=workdir, settings=settings)
        return connection

    async def _start(self) -> Connection:
        connection = Connection(self.limits.output_bytes, self._reach, self._setup)
        if self._python:  # it has something to start
            try:
                await connection.reach(deadline_s=self.limits.margin_s)
            except BaseException:
                await connection.aclose()
                raise
        return connection

    async def _reach(self) -> socket.socket:
        return await self.sandbox.spawn(ENTRY, template=self._template)

    def _setup(self, request_id: int) -> Setup:
        return Setup(
            request_id,
            self.sandbox.spec.workdir,
            {**born.ENVIRONMENT, **self.sandbox.spec.env},
            self.limits.output_bytes,
            self.limits.grace_s,
            self._python,
        )


def check_timeout(timeout_s: float) -> None:
    """Raises InputError where this is not a positive number of seconds."""
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InputError(f"timeout_s is {timeout_s}; it must be a positive number of seconds")
