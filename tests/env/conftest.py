"""A node over the shared driver."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_envs.env.node import Node
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver


@pytest.fixture(scope="module")
async def node(shared_driver: BubblewrapDriver, run_dir: Path) -> AsyncIterator[Node]:
    """Node with the shared driver; the driver's fixture closes the driver."""
    yield Node(shared_driver, run_dir / "cache")
