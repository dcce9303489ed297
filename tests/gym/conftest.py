"""Fixtures of the tests of gymnasium environments."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from prorl_envs.env.node import Node
from prorl_envs.env.runner import Runner
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from tests.support.sandbox_entry import LIGHT_TEMPLATES


@pytest.fixture(scope="module")
def runner(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Runner whose driver all tests share; the templates are started at setup."""
    cache = tmp_path_factory.mktemp("cache")
    runner = Runner(lambda: Node(BubblewrapDriver(templates=LIGHT_TEMPLATES), cache))
    runner.run(lambda node: cast(BubblewrapDriver, node.driver).warm())
    yield runner
    runner.close()
