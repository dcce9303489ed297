"""Drivers whose templates fork the minimal tool server of `prorl_envs.testing.sandbox_entry`.

Each test that uses one runs once per driver that isolates.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_envs.sandbox.choice import make_driver
from prorl_envs.sandbox.namespaces import NamespaceDriver
from prorl_envs.testing.sandbox_entry import SCRIPT_TEMPLATES


def scripted_driver(name: str) -> NamespaceDriver:
    driver = make_driver(name, templates=SCRIPT_TEMPLATES)
    assert isinstance(driver, NamespaceDriver)
    return driver


@pytest.fixture(scope="module")
async def shell_driver(run_dir: Path, driver_name: str) -> AsyncIterator[NamespaceDriver]:
    """A driver shared by a module's tests; its template is up."""
    driver = scripted_driver(driver_name)
    try:
        await driver.warm()
        yield driver
    finally:
        await driver.aclose()


@pytest.fixture
async def own_driver(run_dir: Path, driver_name: str) -> AsyncIterator[NamespaceDriver]:
    """A driver of the test's own, to break or to close."""
    driver = scripted_driver(driver_name)
    yield driver
    await driver.aclose()
