"""Fixtures every room's tests share: the event loop, the drivers, and the check that nothing is left."""

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from prorl_envs.sandbox.base import Limits
from prorl_envs.sandbox.containment import NodeLimits
from prorl_envs.sandbox.namespaces import NamespaceDriver
from prorl_envs.testing.leaks import Holdings, leaks_since
from prorl_envs.testing.sandbox_entry import LIGHT_TEMPLATES

# Property tests have no deadline: a busy machine is no failure.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

UNWATCHED = NodeLimits(
    each=Limits(memory_bytes=None, processes=None, disk_bytes=None, disk_files=None), reserve_bytes=0
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says of each test that was run again why: pytest itself names it only."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_sep("_", f"run again: {report.nodeid} ({report.when})")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def run_dir() -> Iterator[Path]:
    """Where every driver of this test run makes its directory. Short: socket paths may lie below it."""
    path = Path(tempfile.mkdtemp(prefix="prt-")).resolve()
    before = os.environ.get("PRORL_RUN_DIR")
    os.environ["PRORL_RUN_DIR"] = str(path)
    yield path
    if before is None:
        del os.environ["PRORL_RUN_DIR"]
    else:
        os.environ["PRORL_RUN_DIR"] = before
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def no_leaks(run_dir: Path) -> Iterator[None]:
    """Fails a test that leaves a process, descriptor, mount, socket or driver directory.

    What module- and session-scoped fixtures hold is theirs: they are set up before this one. They must have
    what they keep ready by then, so a shared driver starts its templates up front.
    """
    before = Holdings.now(run_dir)
    yield
    leaks = leaks_since(before, run_dir)
    if leaks:
        pytest.fail("left behind:\n" + "\n".join(leaks))


@pytest.fixture(scope="module", params=["namespaces", "apptainer"])
def driver_name(request: pytest.FixtureRequest) -> str:
    """Either of the drivers that isolate with tool servers outside."""
    return existing_driver(request.param)


def existing_driver(name: str) -> str:
    """The name of a driver, whose test is skipped where its program is not installed."""
    needs_apptainer = name in ("apptainer", "instance")
    if needs_apptainer and not (shutil.which("apptainer") or shutil.which("singularity")):
        pytest.skip("neither Apptainer nor Singularity is installed")
    return name


@pytest.fixture
async def driver(run_dir: Path) -> AsyncIterator[NamespaceDriver]:
    """A driver of the test's own. Real sandboxes: where the machine cannot, the error says what to do.

    Its Python sessions import numpy and the others themselves, as those in an instance do.
    """
    driver = NamespaceDriver(templates=LIGHT_TEMPLATES)
    yield driver
    await driver.aclose()


@pytest.fixture(scope="module")
async def shared_driver(run_dir: Path) -> AsyncIterator[NamespaceDriver]:
    """One like it for a module's tests, its templates started up front. Each test closes its sandboxes.

    Without a watchdog: a look of its own that is under way when a test ends would pass for a leak.
    """
    driver = NamespaceDriver(limits=UNWATCHED, templates=LIGHT_TEMPLATES)
    try:
        await driver.warm()
        yield driver
    finally:
        await driver.aclose()
