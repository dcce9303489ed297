"""Fixtures of the tests; all modules of a test run share the built instances."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.template.template import TemplateSpec


@pytest.fixture(scope="session")
def build_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builds")


@pytest.fixture(scope="module")
async def node(
    family_run_dir: Path, templates: Mapping[str, TemplateSpec], build_cache: Path
) -> AsyncIterator[Node]:
    driver = BubblewrapDriver(family_run_dir, templates=templates)
    async with Node(driver, build_cache) as node:
        await driver.warm()
        yield node


@pytest.fixture(scope="session")
def tasks() -> dict[str, SwebenchTask]:
    """Return the example tasks by id."""
    loaded = load_tasks("swebench", example_path("swebench"))
    return {task.id: task for task in loaded if isinstance(task, SwebenchTask)}
