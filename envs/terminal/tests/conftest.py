"""Fixtures: a node whose builder has a small base image, made from this machine's own programs."""

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.env.node import Node
from prorl_envs.images.dockerfile.build import DockerfileBuilder
from prorl_envs.images.layers import LayerStore
from prorl_envs.images.registry.puller import ImagePuller, PullSettings
from prorl_envs.sandbox.base import Driver
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.filesystem.images import Images
from prorl_envs.sandbox.template.template import TemplateSpec
from tests.sandbox.rootfs import PROGRAMS, write_python, write_rootfs

_MORE = ("base64", "chmod", "grep", "head", "ln", "mkfifo", "mv", "touch", "tr")

#: Test script that gives the reward 1 if `/app/out.txt` is `hello`.
TEST = """\
#!/bin/bash
if [ "$(cat /app/out.txt)" = hello ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""

type MakeRow = Callable[..., dict[str, Any]]


@pytest.fixture
def make_row() -> MakeRow:
    """Return a function that makes rows in Harbor's format; `files` adds or replaces files, None removes."""

    def make(files: Mapping[str, Any] | None = None, *, config: str = "") -> dict[str, Any]:
        directory = {
            "task.toml": f'schema_version = "1.4"\n{config}',
            "instruction.md": "Write hello to /app/out.txt.\n",
            "environment/Dockerfile": "FROM base\nENV GREETING=hello\nWORKDIR /app\nCOPY data.txt .\n",
            "environment/data.txt": "data\n",
            "tests/test.sh": TEST,
            "solution/solve.sh": "#!/bin/bash\necho hello > /app/out.txt\n",
            **(files or {}),
        }
        files = {path: content for path, content in directory.items() if content is not None}
        return {"id": "greet", "directory": files}

    return make


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rootfs(tmp_path_factory.mktemp("base") / "root", (*PROGRAMS, *_MORE))


@pytest.fixture(scope="session")
def python_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_rootfs(tmp_path_factory.mktemp("python") / "root", (*PROGRAMS, *_MORE))
    write_python(root, "/usr", packages=())
    return root


@pytest.fixture(scope="module")
async def node(
    family_run_dir: Path, templates: Mapping[str, TemplateSpec], base: Path, python_base: Path
) -> AsyncIterator[Node]:
    cache = family_run_dir / "cache"
    cache.mkdir(exist_ok=True)
    scratch = family_run_dir / "scratch"
    scratch.mkdir(exist_ok=True)

    def dockerfiles(driver: Driver) -> DockerfileBuilder:
        store = LayerStore(cache / "layers")
        bases = {"base": base, "debian:12-slim": base, "python": python_base}
        puller = ImagePuller(store, PullSettings(bases=bases))
        return DockerfileBuilder(store, driver, puller=puller, scratch=scratch)

    driver = BubblewrapDriver(family_run_dir, templates=templates)
    driver.images = Images(driver.directory.base, idle_limit=0)  # an idle mount would count as a leak
    async with Node(driver, cache, dockerfiles=dockerfiles) as node:
        await driver.warm()
        yield node
