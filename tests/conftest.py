"""Fixtures that all tests share: the event loop, the drivers, and the leak check."""

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from hypothesis import settings

from prorl_envs.sandbox.base import SandboxLimits
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.limits.enforcement import NodeLimits
from tests.places import drivers_directory
from tests.support.leaks import OpenResources, end_processes_since, leaks_since
from tests.support.sandbox_entry import LIGHT_TEMPLATES

# Property tests have no deadline: a busy machine is no failure.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

UNWATCHED = NodeLimits(
    per_sandbox=SandboxLimits(memory_bytes=None, processes=None, disk_bytes=None, disk_files=None),
    reserve_bytes=0,
)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def run_dir() -> Iterator[Path]:
    """Directory of the drivers' files: on disk, or in memory for modules that create many drivers."""
    yield from drivers_directory()


@pytest.fixture(scope="session", autouse=True)
def state_dir() -> Iterator[Path]:
    """State directory of this test run's services and clients, with their tokens."""
    path = Path(tempfile.mkdtemp(prefix="prt-state-"))
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(path)
    yield path
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def no_leaks(run_dir: Path) -> Iterator[None]:
    """Fail a test that leaves a process, descriptor, mount, socket or driver directory.

    Module- and session-scoped fixtures are set up before this one, so their resources do not count. They must
    acquire everything at setup: a shared driver starts its templates up front.
    """
    before = OpenResources.now(run_dir)
    yield
    # multiprocessing keeps these for later use, by default from Python 3.14 on.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    leaks = leaks_since(before, run_dir)
    if leaks:
        end_processes_since(before, run_dir)
        pytest.fail("left behind:\n" + "\n".join(leaks))


@pytest.fixture(scope="module", params=["bubblewrap", "apptainer"])
def driver_name(request: pytest.FixtureRequest) -> str:
    """Name of each driver that isolates with its tool servers outside the sandbox."""
    return existing_driver(request.param)


def existing_driver(name: str) -> str:
    """Name of a driver; skip the test if the driver's program is not installed."""
    needs_apptainer = name in ("apptainer", "apptainer-instance")
    if needs_apptainer and not (shutil.which("apptainer") or shutil.which("singularity")):
        pytest.skip("neither Apptainer nor Singularity is installed")
    return name


@pytest.fixture(scope="session")
def busybox() -> str:
    """Path of a static busybox, for the smallest image."""
    if (found := shutil.which("busybox")) is None:
        pytest.skip("busybox is not installed")
    return found


@pytest.fixture
async def driver(run_dir: Path) -> AsyncIterator[BubblewrapDriver]:
    """Driver for one test, with real sandboxes. If the machine cannot run it, the error gives the remedy.

    Its Python sessions import numpy and other libraries themselves, like sessions in an instance.
    """
    driver = BubblewrapDriver(templates=LIGHT_TEMPLATES)
    yield driver
    await driver.aclose()


@pytest.fixture(scope="module")
async def shared_driver(run_dir: Path) -> AsyncIterator[BubblewrapDriver]:
    """Driver for a module's tests, with its templates started up front. Each test closes its sandboxes.

    It has no watchdog: a check that is in progress at the end of a test would look like a leak.
    """
    driver = BubblewrapDriver(limits=UNWATCHED, templates=LIGHT_TEMPLATES)
    try:
        await driver.warm()
        yield driver
    finally:
        await driver.aclose()
