"""A sandbox for the adversary, small in every way, and one beside it that must notice nothing."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from prorl_envs.sandbox.base import Limits, SandboxSpec
from prorl_envs.sandbox.cgroups import Mechanism
from prorl_envs.sandbox.choice import make_driver
from prorl_envs.sandbox.containment import NodeLimits
from prorl_envs.sandbox.runtime import python_runtime
from prorl_envs.testing.sandbox_entry import LIGHT_TEMPLATES
from prorl_envs.tools.client import Toolbox
from prorl_envs.tools.link import ToolLimits
from tests.attacks.attempts import Driver, OpenBox
from tests.conftest import existing_driver

LIMITS = Limits(memory_bytes=256 << 20, processes=40, open_files=1024, disk_bytes=20 << 20, disk_files=2000)


@pytest.fixture(scope="module", params=["namespaces", "apptainer", "instance"])
def driver_name(request: pytest.FixtureRequest) -> str:
    """Every driver that isolates: with tool servers outside, and inside."""
    return existing_driver(request.param)


@pytest.fixture(scope="module")
async def attacked(run_dir: Path, driver_name: str) -> AsyncIterator[Driver]:
    """The driver of a module's attacks, whose limits the watchdog keeps."""
    limits = NodeLimits(each=LIMITS, mechanism=Mechanism.WATCHDOG)
    driver = make_driver(driver_name, templates=LIGHT_TEMPLATES, limits=limits)
    try:
        await driver.warm()
        yield driver
    finally:
        await driver.aclose()


@pytest.fixture
async def open_box(attacked: Driver) -> AsyncIterator[OpenBox]:
    """Starts a sandbox with tools; they are closed with the test."""
    async with AsyncExitStack() as opened:

        async def open_one(*, python: bool = False) -> Toolbox:
            mounts, masks, env = python_runtime() if python else ((), (), {})
            sandbox = await attacked.start(SandboxSpec(mounts=mounts, masks=masks, env=env))
            opened.push_async_callback(sandbox.close)
            box = await Toolbox.open(sandbox, python=python, limits=ToolLimits(grace_s=0.3))
            opened.push_async_callback(box.aclose)
            return box

        yield open_one


@pytest.fixture
async def neighbour(open_box: OpenBox, attacked: Driver) -> AsyncIterator[Toolbox]:
    """Somebody else's sandbox, with a variable and a background job that are there in the end."""
    box = await open_box()
    templates = {name: template.pid for name, template in attacked.templates.items()}
    await box.bash("kept=7; sleep 600 &", timeout_s=20)
    yield box
    assert (await box.bash("echo $kept; jobs -r | wc -l", timeout_s=20)).text == "7\n1\n"
    assert {name: template.pid for name, template in attacked.templates.items()} == templates


@pytest.fixture
async def box(open_box: OpenBox, neighbour: Toolbox) -> Toolbox:
    """The adversary's."""
    return await open_box()


@pytest.fixture
async def python_box(open_box: OpenBox, neighbour: Toolbox) -> Toolbox:
    """The adversary's, with a Python session."""
    return await open_box(python=True)
