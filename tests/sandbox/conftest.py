"""Drivers whose templates fork the minimal tool server of `tests.support.sandbox_entry`.

Each test with such a driver runs once per isolating driver.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.drivers.select import make_driver
from tests.support.sandbox_entry import SCRIPT_TEMPLATES


def scripted_driver(name: str) -> BubblewrapDriver:
    driver = make_driver(name, templates=SCRIPT_TEMPLATES)
    assert isinstance(driver, BubblewrapDriver)
    return driver


@pytest.fixture(scope="module")
async def shell_driver(run_dir: Path, driver_name: str) -> AsyncIterator[BubblewrapDriver]:
    """Driver for all tests of a module; its template is started at setup."""
    driver = scripted_driver(driver_name)
    try:
        await driver.warm()
        yield driver
    finally:
        await driver.aclose()


@pytest.fixture
async def own_driver(run_dir: Path, driver_name: str) -> AsyncIterator[BubblewrapDriver]:
    """Driver for a single test, which may break or close it."""
    driver = scripted_driver(driver_name)
    yield driver
    await driver.aclose()
