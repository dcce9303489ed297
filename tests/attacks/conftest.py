"""A small sandbox for the adversary, and a neighbour that must not be affected."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from prorl_envs.sandbox.base import SandboxLimits, SandboxSpec
from prorl_envs.sandbox.drivers.select import make_driver
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.sandbox.limits.enforcement import NodeLimits
from prorl_envs.sandbox.linux.cgroups import Mechanism
from prorl_envs.tools.client.connection import ToolLimits
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox
from tests.attacks.attempts import Driver, OpenBox, usable
from tests.conftest import existing_driver
from tests.support.sandbox_entry import LIGHT_TEMPLATES

LIMITS = SandboxLimits(
    memory_bytes=256 << 20, processes=40, open_files=1024, disk_bytes=20 << 20, disk_files=2000
)


@pytest.fixture(scope="module", params=["bubblewrap", "apptainer", "apptainer-instance"])
def driver_name(request: pytest.FixtureRequest) -> str:
    """Name of each isolating driver: with tool servers outside, and inside."""
    return existing_driver(request.param)


@pytest.fixture(scope="module")
async def attacked(run_dir: Path, driver_name: str) -> AsyncIterator[Driver]:
    """Driver of a module's attacks. Its watchdog enforces the limits."""
    limits = NodeLimits(per_sandbox=LIMITS, enforcement=Mechanism.WATCHDOG)
    driver = make_driver(driver_name, templates=LIGHT_TEMPLATES, limits=limits)
    try:
        await driver.warm()
        yield driver
        # After the attacks, the driver starts other sandboxes, and its watchdog works.
        async with AsyncExitStack() as opened:
            sandbox = await driver.start(SandboxSpec())
            opened.push_async_callback(sandbox.close)
            box = await Toolbox.open(sandbox, python=PythonEngine.NONE)
            opened.push_async_callback(box.aclose)
            await usable(box)
        driver.limit_enforcer._watchdog.check()
    finally:
        await driver.aclose()


@pytest.fixture
async def open_box(attacked: Driver) -> AsyncIterator[OpenBox]:
    """Start sandboxes with tools; close the tools with the test."""
    async with AsyncExitStack() as opened:

        async def open_one(*, python: bool = False) -> Toolbox:
            mounts, masks, env = python_runtime() if python else ((), (), {})
            sandbox = await attacked.start(SandboxSpec(mounts=mounts, masks=masks, env=env))
            opened.push_async_callback(sandbox.close)
            engine = PythonEngine.FORKED if python else PythonEngine.NONE
            box = await Toolbox.open(sandbox, python=engine, limits=ToolLimits(grace_s=0.3))
            opened.push_async_callback(box.aclose)
            return box

        yield open_one


@pytest.fixture
async def neighbour(open_box: OpenBox, attacked: Driver) -> AsyncIterator[Toolbox]:
    """Another user's sandbox, whose variable and background job must survive the test."""
    box = await open_box()
    templates = {name: template.pid for name, template in attacked.templates.items()}
    await box.bash("kept=7; sleep 600 &", timeout_s=20)
    yield box
    assert (await box.bash("echo $kept; jobs -r | wc -l", timeout_s=20)).text == "7\n1\n"
    assert {name: template.pid for name, template in attacked.templates.items()} == templates


@pytest.fixture
async def box(open_box: OpenBox, neighbour: Toolbox) -> Toolbox:
    """Sandbox of the adversary."""
    return await open_box()


@pytest.fixture
async def python_box(open_box: OpenBox, neighbour: Toolbox) -> Toolbox:
    """Sandbox of the adversary, with a Python session."""
    return await open_box(python=True)
