"""What can run Python cells in a sandbox, behind one contract."""

import time
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from prorl_envs.errors import ToolError
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools.connection import ServerLost
from prorl_envs.tools.link import ServerLink, Session, ToolLimits
from prorl_envs.tools.results import python_result, server_lost
from prorl_envs.tools.types import ToolResult
from prorl_envs.tools.wire import Python, PythonDone


class PythonEngine(StrEnum):
    """What runs Python cells.

    NONE: nothing does. FORKED: IPython in a process forked warm from the host's own interpreter. KERNEL: a
    Jupyter kernel started by the sandbox's own `python3`, which must have ipykernel.
    """

    NONE = "none"
    FORKED = "forked"
    KERNEL = "kernel"


class PythonTool(Protocol):
    """A persistent Python session. Called by `Toolbox` alone."""

    async def start(self) -> None:
        """Make it ready for the first cell.

        Raises:
            SandboxError, ToolError: it cannot be.
        """
        ...

    async def run(self, code: str, *, timeout_s: float) -> ToolResult:
        """Run a cell: see `Toolbox.python`."""
        ...

    async def restart(self) -> None:
        """See `Toolbox.restart_python`."""
        ...

    def connection_file(self) -> Path | None:
        """See `Toolbox.jupyter_connection_file`; None where no Jupyter client can attach."""
        ...

    async def aclose(self) -> None:
        """End it. Idempotent."""
        ...


class ForkedPython:
    """IPython forked warm from a tool server.

    The server is one of its own: a session's memory is a copy of its server's, which must hold nothing else.
    """

    def __init__(self, sandbox: Sandbox, limits: ToolLimits) -> None:
        self._sandbox = sandbox
        self._link = ServerLink(sandbox, "ipython", limits, python=True)
        self._session = Session()

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
            raise self._sandbox.ended()
        return python_result(done, "Python session" if lost else "", time.monotonic() - started)

    async def restart(self) -> None:
        (await self._link.connection()).give_up("the Python session was restarted")
        self._session.server = None  # the caller knows that it is a new one
        await self._link.connection()

    def connection_file(self) -> None:
        return None

    async def aclose(self) -> None:
        await self._link.aclose()
