"""Fixtures of the families' tests: a node of real sandboxes, and the check that nothing is left."""

import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from prorl_envs.env.node import Node
from prorl_envs.sandbox.namespaces import NamespaceDriver
from prorl_envs.sandbox.template import TemplateSpec
from prorl_envs.testing.leaks import Holdings, leaks_since
from prorl_envs.testing.sandbox_entry import LIGHT_TEMPLATES


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def family_run_dir() -> Iterator[Path]:
    """Where the node keeps its sandboxes. Short: socket paths may lie below it."""
    with tempfile.TemporaryDirectory(prefix="pre-") as path:
        yield Path(path).resolve()


@pytest.fixture(scope="module")
def templates() -> Mapping[str, TemplateSpec]:
    """What the module's node forks its tools from; a module that tries the libraries ahead has its own."""
    return LIGHT_TEMPLATES


@pytest.fixture(scope="module")
async def node(family_run_dir: Path, templates: Mapping[str, TemplateSpec]) -> AsyncIterator[Node]:
    """One node for a module's tests, its templates started up front."""
    driver = NamespaceDriver(family_run_dir, templates=templates)
    cache = family_run_dir / "cache"
    cache.mkdir(exist_ok=True)  # outlives the tests that put something into it
    async with Node(driver, cache) as node:
        await driver.warm()
        yield node


@pytest.fixture(autouse=True)
def no_leaks(family_run_dir: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process, descriptor, mount, socket or sandbox directory."""
    if "node" in request.fixturenames:
        request.getfixturevalue("node")  # what the module's node holds is the module's
    before = Holdings.now(family_run_dir)
    yield
    if leaks := leaks_since(before, family_run_dir):
        pytest.fail("left behind:\n" + "\n".join(leaks))
