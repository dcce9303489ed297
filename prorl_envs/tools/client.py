"""The host's side of a tool server."""

from typing import Self

from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools.types import ToolResult


class Toolbox:
    """The tools of one sandbox, over the socket of its tool server."""

    @classmethod
    async def open(cls, sandbox: Sandbox, *, python: bool = False) -> Self:
        raise NotImplementedError

    async def bash(self, command: str, *, timeout_s: float) -> ToolResult:
        raise NotImplementedError

    async def python(self, code: str, *, timeout_s: float) -> ToolResult:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError
