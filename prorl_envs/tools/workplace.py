"""A sandbox with its tools: what an episode works in."""

from dataclasses import dataclass
from typing import Self

from prorl_envs.sandbox.base import Driver, Sandbox, SandboxSpec
from prorl_envs.tools.client import Toolbox


@dataclass(frozen=True, slots=True)
class Workplace:
    """A running sandbox and its tools. Made by `open`; closed by whoever opened it."""

    sandbox: Sandbox
    tools: Toolbox

    @classmethod
    async def open(cls, driver: Driver, spec: SandboxSpec, *, python: bool = False) -> Self:
        """Start a sandbox and fork a tool server into it.

        Args:
            driver: starts the sandbox.
            spec: what it should look like.
            python: with a warm IPython session.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        sandbox = await driver.start(spec)
        try:
            return cls(sandbox, await Toolbox.open(sandbox, python=python))
        except BaseException:
            await sandbox.close()
            raise

    async def aclose(self) -> None:
        """End the tools, then the sandbox. Idempotent."""
        try:
            await self.tools.aclose()
        finally:
            await self.sandbox.close()
