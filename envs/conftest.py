"""Fixtures of the families' tests: a node of real sandboxes, and the leak check."""

import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from prorl_envs.env.node import Node
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.template.template import TemplateSpec
from tests.support.leaks import OpenResources, leaks_since
from tests.support.sandbox_entry import LIGHT_TEMPLATES

#: NeMo Gym runs the tests of its server folders: tests/nemo/test_onboarding.py.
collect_ignore_glob = ["*/nemo/*"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def family_run_dir() -> Iterator[Path]:
    """Provide the directory of the node's sandboxes. Short, because it may hold socket paths."""
    with tempfile.TemporaryDirectory(prefix="pre-") as path:
        yield Path(path).resolve()


@pytest.fixture(scope="module")
def templates() -> Mapping[str, TemplateSpec]:
    """Return the templates of the module's node; a module that preloads the libraries overrides it."""
    return LIGHT_TEMPLATES


@pytest.fixture(scope="module")
async def node(family_run_dir: Path, templates: Mapping[str, TemplateSpec]) -> AsyncIterator[Node]:
    """Provide one node for a module's tests, with its templates started in advance."""
    driver = BubblewrapDriver(family_run_dir, templates=templates)
    cache = family_run_dir / "cache"
    cache.mkdir(exist_ok=True)  # outlives the tests that write to it
    async with Node(driver, cache) as node:
        await driver.warm()
        yield node


@pytest.fixture(autouse=True)
def no_leaks(family_run_dir: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks a process, descriptor, mount, socket or sandbox directory."""
    if "node" in request.fixturenames:
        request.getfixturevalue("node")  # resources of the module's node belong to the module
    before = OpenResources.now(family_run_dir)
    yield
    if leaks := leaks_since(before, family_run_dir):
        pytest.fail("left behind:\n" + "\n".join(leaks))
