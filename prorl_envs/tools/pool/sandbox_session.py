"""A sandbox together with its tools, as used by an episode."""

from dataclasses import dataclass
from typing import Self

from prorl_envs.sandbox.base import Driver, Sandbox, SandboxSpec
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox


@dataclass(frozen=True, slots=True)
class SandboxSession:
    """Running sandbox and its tools. Created by `open`; the creator closes it."""

    sandbox: Sandbox
    tools: Toolbox

    @classmethod
    async def open(
        cls, driver: Driver, spec: SandboxSpec, *, python: PythonEngine = PythonEngine.NONE
    ) -> Self:
        """Start a sandbox and open its tools.

        Args:
            driver: starts the sandbox.
            spec: specification of the sandbox.
            python: engine of its Python session.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
            EnvironmentFault: the sandbox has no interpreter for a Jupyter kernel.
        """
        sandbox = await driver.start(spec)
        try:
            return cls(sandbox, await Toolbox.open(sandbox, python=python))
        except BaseException:
            await sandbox.close()
            raise

    async def aclose(self) -> None:
        """Stop the tools, then the sandbox. Idempotent."""
        try:
            await self.tools.aclose()
        finally:
            await self.sandbox.close()
