"""Engines that run Python cells in a sandbox, behind one contract."""

import time
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from prorl_envs.errors import ToolError
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools.client.connection import ServerLost
from prorl_envs.tools.client.results import python_result, server_lost
from prorl_envs.tools.client.server_handle import ToolLimits, ToolServerHandle, ToolServerSession
from prorl_envs.tools.protocol.messages import Python, PythonDone
from prorl_envs.tools.types import ToolResult


class PythonEngine(StrEnum):
    """Engine for Python cells.

    NONE: no Python. FORKED: IPython in a process forked warm from the host's own interpreter. KERNEL: a
    Jupyter kernel of the sandbox's own `python3`, which must have ipykernel.
    """

    NONE = "none"
    FORKED = "forked"
    KERNEL = "kernel"


class PythonTool(Protocol):
    """Persistent Python session. Called only by `Toolbox`."""

    async def start(self) -> None:
        """Prepare the session for the first cell.

        Raises:
            SandboxError, ToolError: the session cannot be started.
            EnvironmentFault: the sandbox lacks a program or package that the session needs.
        """
        ...

    async def run(self, code: str, *, timeout_s: float) -> ToolResult:
        """Run a cell: see `Toolbox.python`."""
        ...

    async def restart(self) -> None:
        """Restart the session: see `Toolbox.restart_python`."""
        ...

    def connection_file(self) -> Path | None:
        """Return the path of `Toolbox.jupyter_connection_file`; None if no Jupyter client can attach."""
        ...

    async def aclose(self) -> None:
        """Stop the session. Idempotent."""
        ...


class ForkedPython:
    """IPython forked warm from a tool server.

    The tool server does nothing else, because its memory is copied to the session and must hold nothing else.
    """

    def __init__(self, sandbox: Sandbox, limits: ToolLimits) -> None:
        self._sandbox = sandbox
        self._link = ToolServerHandle(sandbox, "ipython", limits, python=True)
        self._session = ToolServerSession()

    async def start(self) -> None:
        await self._link.connection()

    async def run(self, code: str, *, timeout_s: float) -> ToolResult:
        started = time.monotonic()
        session = self._session
        async with session.lock:
            connection = await self._link.connection()
            lost = session.server is not None and session.server is not connection
            session.server = connection
            try:
                done = await self._link.ask(
                    lambda id_: Python(id_, code, timeout_s),
                    PythonDone,
                    timeout_s=timeout_s,
                    connection=connection,
                )
            except ServerLost as error:
                session.server = None
                return server_lost(error, "Python session", time.monotonic() - started)
            except OSError as error:
                raise ToolError(f"no Python session could be started: {error}") from error
        if done.notice and not self._sandbox.alive:
            raise self._sandbox.end_error()
        return python_result(done, "Python session" if lost else "", time.monotonic() - started)

    async def restart(self) -> None:
        (await self._link.connection()).give_up("the Python session was restarted")
        self._session.server = None  # the caller knows that the session is new
        await self._link.connection()

    def connection_file(self) -> None:
        return None

    async def aclose(self) -> None:
        await self._link.aclose()
