"""Build of an instance's tree and environment, once per machine; every sandbox works on a view or a copy.

    <cache>/swebench/<key>/
        testbed/        the tree at the base commit, a git repository of one commit
        miniconda3/     built from a release: the virtual environment, its wheels, the `activate` script
        hidden/ empty   built from an image: files hidden from the agent, and the empty file shown instead
        built.json      fields of `BuiltRoot`; written last

The key is a digest of everything that determines the content, so a cached build is never out of date. A build
runs in another folder, which is renamed at the end; a lock per key makes other builders wait.
"""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from prorl_envs.env.node import Node
from prorl_envs.envs.swebench import from_image, from_release
from prorl_envs.envs.swebench.images import Images
from prorl_envs.envs.swebench.interpreters import choose
from prorl_envs.envs.swebench.options import SwebenchOptions
from prorl_envs.envs.swebench.root import BuiltRoot
from prorl_envs.envs.swebench.task import EnvironmentSpec, SwebenchTask
from prorl_envs.errors import EnvironmentFault
from prorl_envs.images.lock import key_lock
from prorl_envs.sandbox.filesystem.directories import remove_tree

type Progress = Callable[[str], None]


def missing(task: SwebenchTask, options: SwebenchOptions) -> str:
    """Return why this machine cannot build `task`, or "". Blocks."""
    if shutil.which("git") is None:
        return "git is not installed"
    if (reason := _no_interpreter(task.environment)) and (no_image := Images(options.images).missing(task)):
        return reason if task.environment is not None else no_image
    return ""


def _no_interpreter(spec: EnvironmentSpec | None) -> str:
    if spec is None:
        return "it has no recipe to build it from a release"
    try:
        choose(spec.pythons)
    except EnvironmentFault as fault:
        return fault.message
    return ""


class Builder:
    """Builder of instances on a node, with reuse of existing builds.

    Args:
        node: provides the sandboxes and the cache directory.
        options: locations of images, and the preferred build method.
    """

    def __init__(self, node: Node, options: SwebenchOptions | None = None) -> None:
        self._node = node
        self._options = options or SwebenchOptions()
        self._cache = node.cache_dir / "swebench"

    async def build(self, task: SwebenchTask, progress: Progress = lambda line: None) -> BuiltRoot:
        """Return the built instance of `task`.

        Waits while another job or process builds the same instance.

        Args:
            progress: called with a short description of each step; not called if the instance is built
                already.

        Raises:
            EnvironmentFault: there is no interpreter, image or network, or a step failed; the message says
                which.
            SandboxError, ToolError: the build's sandbox failed.
        """
        if shutil.which("git") is None:
            raise EnvironmentFault("git is not installed", hint="install it from the system's packages")
        if await asyncio.to_thread(self._from_image, task):
            image = await Images(self._options.images).obtain(self._node, task, progress)
            return await self._once(task, from_image.Build(self._node, task, image), progress)
        assert task.environment is not None
        interpreter = await asyncio.to_thread(choose, task.environment.pythons)
        return await self._once(task, from_release.Build(self._node, task, interpreter), progress)

    def _from_image(self, task: SwebenchTask) -> bool:
        if task.environment is None:
            return True
        preferred = self._options.prefer == "image" or bool(_no_interpreter(task.environment))
        return preferred and not Images(self._options.images).missing(task)

    async def _once(
        self, task: SwebenchTask, build: "from_image.Build | from_release.Build", progress: Progress
    ) -> BuiltRoot:
        folder = self._cache / build.key
        try:
            if (built := await asyncio.to_thread(_load, folder)) is not None:
                return built
            await asyncio.to_thread(self._cache.mkdir, parents=True, exist_ok=True)
            async with key_lock(folder.with_suffix(".lock")):
                if (built := await asyncio.to_thread(_load, folder)) is None:
                    progress("building")
                    built = await _build(build, folder, progress)
        except OSError as error:
            raise EnvironmentFault(
                f"{task.id} cannot be built in {self._cache}: {error}",
                hint="a build needs about 100 MB there; PRORL_CACHE_DIR sets another directory",
            ) from error
        return built


async def _build(
    build: "from_image.Build | from_release.Build", folder: Path, progress: Progress
) -> BuiltRoot:
    staging = folder.with_suffix(".building")
    await asyncio.to_thread(remove_tree, staging)  # left by a build that was killed
    try:
        await asyncio.to_thread(staging.mkdir)
        fields = await build.into(staging, progress)
        built = BuiltRoot(folder=folder, **fields)
        record = built.model_dump_json(exclude={"folder"})
        await asyncio.to_thread((staging / "built.json").write_text, record)
        await asyncio.to_thread(staging.rename, folder)
    finally:
        await asyncio.shield(asyncio.to_thread(remove_tree, staging))
    return built


def _load(folder: Path) -> BuiltRoot | None:
    try:
        record = json.loads((folder / "built.json").read_bytes())
        return BuiltRoot.model_validate({**record, "folder": folder})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:  # errors of pydantic and json are ValueErrors
        raise EnvironmentFault(f"{folder} is damaged: {error}", hint="remove that folder") from error
