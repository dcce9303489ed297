"""Drivers whose templates fork the minimal tool server of `prorl_envs.testing.sandbox_entry`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_envs.sandbox.bubblewrap import BubblewrapDriver
from prorl_envs.testing.sandbox_entry import SCRIPT_TEMPLATES


@pytest.fixture(scope="module")
async def shell_driver(run_dir: Path) -> AsyncIterator[BubblewrapDriver]:
    """A driver shared by a module's tests; its template is up."""
    driver = BubblewrapDriver(templates=SCRIPT_TEMPLATES)
    try:
        await driver.warm()
        yield driver
    finally:
        await driver.aclose()


@pytest.fixture
async def own_driver(run_dir: Path) -> AsyncIterator[BubblewrapDriver]:
    """A driver of the test's own, to break or to close."""
    driver = BubblewrapDriver(templates=SCRIPT_TEMPLATES)
    yield driver
    await driver.aclose()
