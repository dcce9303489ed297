"""Toolboxes with real sandboxes. The tests of a module share a driver, and each test has its own sandbox."""

from collections.abc import AsyncIterator

import pytest

from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.tools.client.connection import ToolLimits
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox

#: Long, because no machine is too slow to interrupt.
LIMITS = ToolLimits(grace_s=30.0)
#: For tests of the steps after an ignored interrupt, which parametrise their toolbox with it.
HASTY = ToolLimits(grace_s=0.5)


@pytest.fixture
async def box(shared_driver: BubblewrapDriver, request: pytest.FixtureRequest) -> AsyncIterator[Toolbox]:
    """Shell, editor and files in a new sandbox."""
    sandbox = await shared_driver.start(SandboxSpec())
    toolbox = await Toolbox.open(sandbox, limits=getattr(request, "param", LIMITS))
    yield toolbox
    await toolbox.aclose()
    await sandbox.close()


@pytest.fixture
async def python_box(
    shared_driver: BubblewrapDriver, request: pytest.FixtureRequest
) -> AsyncIterator[Toolbox]:
    """Shell, editor, files and a Python session in a new sandbox."""
    mounts, masks, _ = python_runtime()
    spec = SandboxSpec(mounts=mounts, masks=masks)
    sandbox = await shared_driver.start(spec)
    toolbox = await Toolbox.open(
        sandbox, python=PythonEngine.FORKED, limits=getattr(request, "param", LIMITS)
    )
    yield toolbox
    await toolbox.aclose()
    await sandbox.close()
