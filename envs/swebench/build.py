"""Builds an instance's tree and environment once per machine; every sandbox then works on a view of them.

    <cache>/swebench/<key>/
        testbed/        the tree at the base commit, a git repository of one commit
        miniconda3/     the virtual environment, its wheels, the `activate` that the official scripts source
        built.json      what is needed to use them; written last

The key is made of everything that decides the content, so nothing in the cache is ever out of date. A build
happens in a folder beside it and is renamed when done; a lock per key makes others wait for it.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import workplace
from prorl_envs.envs.swebench.fetch import CONDA, SDIST, VENV, WHEELS, fetch
from prorl_envs.envs.swebench.interpreters import Interpreter, choose, mounts_of
from prorl_envs.envs.swebench.task import EnvironmentSpec, SwebenchTask
from prorl_envs.envs.swebench.unpack import unpack_sdist
from prorl_envs.errors import EnvironmentFault
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.command import DEFAULT_ENV
from prorl_envs.sandbox.files import remove_tree
from prorl_envs.sandbox.runtime import system_masks
from prorl_envs.tools.workplace import Workplace

TESTBED = "/testbed"
STEP_TIMEOUT_S = 600.0
_LOCK_POLL_S = 0.05
#: Raise it when the layout or the way of building changes.
_FORMAT = 1

#: What the official scripts source, and the one command of conda's that they use.
_ACTIVATE = f"""\
export PATH="{VENV}/bin:$PATH" VIRTUAL_ENV="{VENV}" CONDA_DEFAULT_ENV=testbed
conda() {{ :; }}
"""

#: Kept out of the repository: what installing and running Python leaves in a tree. Source releases rarely
#: bring the repository's own .gitignore.
_EXCLUDED = "build/\n*.egg-info/\n.eggs/\n__pycache__/\n*.py[cod]\n.pytest_cache/\n.tox/\n.cache/\n"

# One commit by nobody at a fixed time, so that its name is the same everywhere. Without a reflog, and packed,
# so that no earlier state can be found. `log.showRoot` keeps the script's `git show` from printing the tree.
_GIT = """
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=base GIT_AUTHOR_EMAIL=base@localhost GIT_AUTHOR_DATE='2000-01-01T00:00:00Z'
export GIT_COMMITTER_NAME=base GIT_COMMITTER_EMAIL=base@localhost GIT_COMMITTER_DATE='2000-01-01T00:00:00Z'
"""
_INIT = """
git -c init.defaultBranch=main init --quiet
git config core.logAllRefUpdates false
git config log.showRoot false
git config gc.auto 0
rm -rf .git/hooks
cat > .git/info/exclude
git add --all
git commit --quiet --message='Base commit'
"""
_SEAL = """
git add --all
git diff --cached --quiet || git commit --quiet --amend --no-edit
git reflog expire --expire=now --all
git gc --quiet --prune=now
"""


class BuiltRoot(BaseModel):
    """A built instance, as its `built.json` says.

    Args:
        folder: where it lies on the host; never changes.
        base_commit: the one commit of its repository.
        python: full version of its interpreter.
        prefix: the interpreter's installation.
        build_s: seconds the build took.
        size_bytes: of all its files.
    """

    model_config = ConfigDict(frozen=True)

    folder: Path
    base_commit: str
    python: str
    prefix: Path
    build_s: float
    size_bytes: int

    def sandbox_spec(self, *further: Mount, workdir: str, default_route: bool = False) -> SandboxSpec:
        """A sandbox with the environment, as a view of its own that it may change.

        Args:
            further: what else appears inside.
            workdir, default_route: as in `SandboxSpec`.
        """
        conda = Mount(source=self.folder / "miniconda3", target=CONDA, overlay=True)
        return _sandbox_spec(conda, self.prefix, *further, workdir=workdir, default_route=default_route)

    @property
    def tree(self) -> Path:
        """The tree at the base commit, on the host."""
        return self.folder / "testbed"


def _sandbox_spec(
    conda: Mount, prefix: Path, *further: Mount, workdir: str, default_route: bool = False
) -> SandboxSpec:
    """The sandbox in which an instance is built, worked on and graded: the same for all three."""
    # The interpreter's own packages are not the instance's, and may hold ours.
    packages = tuple(str(folder) for folder in prefix.glob("lib/python3.*/site-packages"))
    visible = prefix.is_relative_to("/usr")
    return SandboxSpec(
        workdir=workdir,
        env={
            "PATH": f"{VENV}/bin:{DEFAULT_ENV['PATH']}",
            "VIRTUAL_ENV": VENV,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": WHEELS,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        },
        mounts=(conda, *mounts_of(prefix), *further),
        masks=system_masks() if visible else (*system_masks(), *packages),
        default_route=default_route,
    )


def missing(task: SwebenchTask) -> str:
    """What this machine lacks to build `task`, in a sentence; empty where it lacks nothing. Blocks."""
    if shutil.which("git") is None:
        return "git is not installed"
    try:
        choose(task.environment.pythons)
    except EnvironmentFault as fault:
        return fault.message
    return ""


class Builder:
    """Builds instances on a node, or finds them built.

    Args:
        node: its sandboxes, and its cache directory.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._cache = node.cache_dir / "swebench"

    async def build(self, task: SwebenchTask) -> BuiltRoot:
        """The built instance of `task`.

        Waits while another job or process builds the same one.

        Raises:
            EnvironmentFault: no interpreter, no network, a step that failed; the message says which.
            SandboxError, ToolError: the build's sandbox failed.
        """
        if shutil.which("git") is None:
            raise EnvironmentFault("git is not installed", hint="install it from the system's packages")
        spec = task.environment
        interpreter = await asyncio.to_thread(choose, spec.pythons)
        folder = self._cache / _key(spec, interpreter)
        try:
            if (built := await asyncio.to_thread(_load, folder)) is not None:
                return built
            await asyncio.to_thread(self._cache.mkdir, parents=True, exist_ok=True)
            async with _exclusive(folder.with_suffix(".lock")):
                if (built := await asyncio.to_thread(_load, folder)) is None:
                    built = await self._build(spec, interpreter, folder)
        except OSError as error:
            raise EnvironmentFault(
                f"{task.id} cannot be built in {self._cache}: {error}",
                hint="it needs about 100 MB there; PRORL_CACHE_DIR moves it",
            ) from error
        return built

    async def _build(self, spec: EnvironmentSpec, interpreter: Interpreter, folder: Path) -> BuiltRoot:
        started = time.monotonic()
        staging = folder.with_suffix(".building")
        await asyncio.to_thread(remove_tree, staging)  # of a build that was killed
        try:
            conda, tree = staging / "miniconda3", staging / "testbed"
            await asyncio.to_thread(conda.mkdir, parents=True)
            await fetch(conda, spec, interpreter)
            await asyncio.to_thread(unpack_sdist, conda / "sdist", spec.sdist, tree)
            await asyncio.to_thread(_write_activate, conda)
            commit = await self._install(spec, interpreter, conda, tree)
            built = BuiltRoot(
                folder=folder,
                base_commit=commit,
                python=interpreter.version,
                prefix=interpreter.prefix,
                build_s=round(time.monotonic() - started, 3),
                size_bytes=await asyncio.to_thread(_size, staging),
            )
            record = built.model_dump_json(exclude={"folder"})
            await asyncio.to_thread((staging / "built.json").write_text, record)
            await asyncio.to_thread(staging.rename, folder)
        finally:
            await asyncio.shield(asyncio.to_thread(remove_tree, staging))
        return built

    async def _install(self, spec: EnvironmentSpec, interpreter: Interpreter, conda: Path, tree: Path) -> str:
        """Install the tree and commit it, offline, in the kind of sandbox it will be used in."""
        writable = Mount(source=conda, target=CONDA, writable=True)
        testbed = Mount(source=tree, target=TESTBED, writable=True)
        place_spec = _sandbox_spec(writable, interpreter.prefix, testbed, workdir="/workspace")
        tag = f"git tag --force {spec.release_tag}\n" if spec.release_tag else ""
        async with workplace(self._node, place_spec) as place:
            for command in spec.pre_install:
                await _step(place, "pre_install", command)
            await _step(place, "commit", _GIT + _INIT + tag, stdin=_EXCLUDED.encode())
            await _step(place, "install", spec.install)
            await _step(place, "commit", _GIT + _SEAL + tag + f"rm -rf {SDIST}")
            return (await _step(place, "commit", "git rev-parse HEAD")).strip()


async def _step(place: Workplace, name: str, script: str, *, stdin: bytes = b"") -> str:
    shell = ["/bin/bash", "--noprofile", "--norc", "-euo", "pipefail", "-c", script]
    done = await place.tools.run(shell, cwd=TESTBED, stdin=stdin, timeout_s=STEP_TIMEOUT_S)
    output = done.output.decode(errors="replace")
    if done.exit_code != 0:
        why = "took too long" if done.timed_out else f"exit status {done.exit_code}"
        raise EnvironmentFault(
            f"building the instance: {name} failed ({why}): {output[-1500:].strip()}",
            hint="the row's x_env says how it is built",
        )
    return output


def _key(spec: EnvironmentSpec, interpreter: Interpreter) -> str:
    content = {
        "format": _FORMAT,
        "environment": spec.model_dump(mode="json", exclude={"pythons", "default_route"}),
        "python": [interpreter.version, interpreter.platform, str(interpreter.prefix)],
        "uid": os.getuid(),
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{spec.sdist.partition('==')[0].lower()}-{digest[:24]}"


def _load(folder: Path) -> BuiltRoot | None:
    try:
        record = json.loads((folder / "built.json").read_bytes())
        return BuiltRoot.model_validate({**record, "folder": folder})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:  # pydantic's and json's are ValueErrors
        raise EnvironmentFault(f"{folder} is damaged: {error}", hint="remove that folder") from error


def _write_activate(conda: Path) -> None:
    (conda / "bin").mkdir()
    (conda / "bin/activate").write_text(_ACTIVATE)


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


@asynccontextmanager
async def _exclusive(path: Path) -> AsyncIterator[None]:
    """Hold a lock file; released by the kernel even where this process is killed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Asking again and again: the holder may be another process, and a thread that waits in the kernel
        # cannot be cancelled.
        while not _locked(fd):  # noqa: ASYNC110
            await asyncio.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
