"""Build of an instance from a source release, in a virtual environment at the path of the official images'
conda environment."""

import asyncio
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import sandbox_session
from prorl_envs.envs.swebench.fetch import fetch
from prorl_envs.envs.swebench.interpreters import Interpreter
from prorl_envs.envs.swebench.root import CONDA, SDIST, TESTBED, VENV, release_spec
from prorl_envs.envs.swebench.steps import EXCLUDED, GIT, INIT, SEAL, step, tagged
from prorl_envs.envs.swebench.task import EnvironmentSpec, SwebenchTask
from prorl_envs.envs.swebench.unpack import unpack_sdist
from prorl_envs.sandbox.base import Mount
from prorl_envs.tools.pool.sandbox_session import SandboxSession

#: Increase it when the layout or the build method changes.
_FORMAT = 2

#: The file that the official scripts source. It defines `conda`, which they call to activate the environment.
_ACTIVATE = f"""\
export PATH="{VENV}/bin:$PATH" VIRTUAL_ENV="{VENV}" CONDA_DEFAULT_ENV=testbed
conda() {{ :; }}
"""


class Build:
    """One build.

    Args:
        node: runs the sandboxes.
        task: a task with an `environment`.
        interpreter: interpreter of the environment.
    """

    def __init__(self, node: Node, task: SwebenchTask, interpreter: Interpreter) -> None:
        assert task.environment is not None
        self._node, self._task, self._interpreter = node, task, interpreter
        self._spec: EnvironmentSpec = task.environment

    @property
    def key(self) -> str:
        """A name derived from everything that determines the content."""
        spec, interpreter = self._spec, self._interpreter
        content = {
            "format": _FORMAT,
            "environment": spec.model_dump(mode="json", exclude={"pythons", "default_route"}),
            "reverted": [self._task.patch, self._task.test_patch] if spec.revert else [],
            "python": [interpreter.version, interpreter.platform, str(interpreter.prefix)],
            "uid": os.getuid(),
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return f"{spec.sdist.partition('==')[0].lower()}-{digest[:24]}"

    async def into(self, staging: Path, progress: Callable[[str], None]) -> dict[str, Any]:
        """Build into a folder; return the fields of `BuiltRoot`."""
        conda, tree = staging / "miniconda3", staging / "testbed"
        await asyncio.to_thread(conda.mkdir)
        progress("fetching packages")
        await fetch(self._node, conda, self._spec, self._interpreter)
        await asyncio.to_thread(unpack_sdist, conda / "sdist", self._spec.sdist, tree)
        await asyncio.to_thread(_write_activate, conda)
        progress("installing")
        commit = await self._install(conda, tree)
        return {"base_commit": commit, "prefix": self._interpreter.prefix}

    async def _install(self, conda: Path, tree: Path) -> str:
        """Install and commit the tree, offline, in a sandbox like that of an episode; return the commit."""
        spec = self._spec
        writable = Mount(source=conda, target=CONDA, writable=True)
        testbed = Mount(source=tree, target=TESTBED, writable=True)
        sandbox_spec = release_spec(writable, self._interpreter.prefix, testbed, workdir="/workspace")
        tag = tagged(spec.release_tag)
        async with sandbox_session(self._node, sandbox_spec) as session:
            if spec.revert:
                await self._revert(session)
            for command in spec.pre_install:
                await step(session, "pre_install", command)
            await step(session, "commit", GIT + INIT + tag, stdin=EXCLUDED.encode())
            await step(session, "install", spec.install)
            await step(session, "commit", GIT + SEAL + tag + f"rm -rf {SDIST}")
            return (await step(session, "commit", "git rev-parse HEAD")).strip()

    async def _revert(self, session: SandboxSession) -> None:
        for patch in (self._task.patch, self._task.test_patch):
            text = patch if patch.endswith("\n") else f"{patch}\n"
            await step(
                session, "revert", f"{GIT}\ngit apply --reverse --whitespace=nowarn -", stdin=text.encode()
            )


def _write_activate(conda: Path) -> None:
    (conda / "bin").mkdir()
    (conda / "bin/activate").write_text(_ACTIVATE)
