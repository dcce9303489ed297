"""Engines that run Python cells in a sandbox, behind one contract."""

from enum import StrEnum
from pathlib import Path
from typing import Protocol

from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools.client.results import python_result
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
        self._link = ToolServerHandle(sandbox, "ipython", limits, python=True)
        self._session = ToolServerSession(self._link, "Python session")

    async def start(self) -> None:
        await self._link.connection()

    async def run(self, code: str, *, timeout_s: float) -> ToolResult:
        return await self._session.call(
            lambda id_: Python(id_, code, timeout_s), PythonDone, python_result, timeout_s=timeout_s
        )

    async def restart(self) -> None:
        (await self._link.connection()).give_up("the Python session was restarted")
        self._session.connection = None  # the caller knows that the session is new
        await self._link.connection()

    def connection_file(self) -> None:
        return None

    async def aclose(self) -> None:
        await self._link.aclose()
