"""Puts a harness's packages into the cache, once per machine: sandboxes mount them and fetch nothing."""

import asyncio
import contextlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path

from prorl_envs.env.harness.recipe import INSTALLED, Install, Recipe
from prorl_envs.errors import EnvironmentFault
from prorl_envs.images.lock import KeyLock
from prorl_envs.sandbox.base import Mount
from prorl_envs.sandbox.runtime import hidden_in

#: Seconds that an installation may take.
INSTALL_S = 1800.0
_SAID = 2000
_SYSTEM = Path("/usr")


@dataclass(frozen=True, slots=True)
class Installed:
    """What a sandbox is shown of a harness.

    Args:
        mounts: read-only.
        masks: what of them stays hidden.
        path: directories for `PATH`, in front.
    """

    mounts: tuple[Mount, ...] = ()
    masks: tuple[str, ...] = ()
    path: tuple[str, ...] = ()


def place_of(recipe: Recipe, cache_dir: Path) -> Path:
    """Where a recipe's packages lie, or will: another directory for other packages or another Python."""
    install = recipe.install
    what = [install.registry, *install.packages, *install.bare] if install else []
    said = json.dumps([*what, sys.version, platform.machine()] if what else [])
    return cache_dir / "harnesses" / f"{recipe.name}-{blake2s(said.encode(), digest_size=6).hexdigest()}"


def missing(recipe: Recipe, cache_dir: Path) -> str:
    """Why the harness cannot run on this machine, or ""."""
    if recipe.install is None:
        return ""
    if recipe.install.node and _node() is None:
        return f"the harness {recipe.name} needs Node.js, which is not in PATH"
    if not place_of(recipe, cache_dir).is_dir():
        return f"the harness {recipe.name} is not installed: prorl-envs harness install {recipe.name}"
    return ""


def installed(recipe: Recipe, cache_dir: Path) -> Installed:
    """What a sandbox is shown of it.

    Raises:
        EnvironmentFault: it is not installed.
    """
    install = recipe.install
    if install is None:
        return Installed()
    if reason := missing(recipe, cache_dir):
        raise EnvironmentFault(reason, hint="nothing is fetched while rollouts run")
    mounts = [Mount(source=place_of(recipe, cache_dir), target=INSTALLED)]
    masks: list[str] = []
    path: list[str] = []
    base = Path(sys.base_prefix)
    if install.registry == "pypi" and not base.is_relative_to(_SYSTEM):
        mounts.append(Mount(source=base, target=str(base)))
        masks += hidden_in(Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(base)})))
    node = _node() if install.node else None
    if node is not None and not node.is_relative_to(_SYSTEM):
        mounts.append(Mount(source=node.parent.parent, target="/opt/node"))
        path.append("/opt/node/bin")
    return Installed(tuple(mounts), tuple(masks), tuple(path))


async def install(recipe: Recipe, cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """Install a recipe's packages, unless they are. Of two at a time, on any node, one waits for the other.

    Args:
        progress: told in a few words what is being done.

    Returns:
        where they are.

    Raises:
        EnvironmentFault: the registry's client failed, or it is missing.
    """
    place = place_of(recipe, cache_dir)
    if recipe.install is None or not missing(recipe, cache_dir):
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = place.with_name(f".{place.name}.lock")
    async with KeyLock(
        lock, on_wait=lambda owner: progress(f"somebody else installs {recipe.name}: waiting")
    ):
        if not missing(recipe, cache_dir):
            return place
        progress(f"installing {', '.join(recipe.install.packages)}")
        half = await asyncio.to_thread(_begin, place)
        try:
            for command in _commands(recipe.install, half):
                await _run(command, half)
            await asyncio.to_thread(_settle, half, place)
        finally:
            await asyncio.to_thread(shutil.rmtree, half, ignore_errors=True)
    return place


def _begin(place: Path) -> Path:
    """An empty directory beside `place`, and none that a killed installation left."""
    halves = f".{place.name}-"
    for left in place.parent.glob(f"{halves}*"):
        shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=halves, dir=place.parent))


def _settle(half: Path, place: Path) -> None:
    half.chmod(0o755)
    with contextlib.suppress(OSError):  # somebody else was faster, by a lock that was taken for dead
        half.rename(place)


def _commands(install: Install, place: Path) -> list[list[str]]:
    if install.registry == "npm":
        if (npm := shutil.which("npm")) is None:
            raise EnvironmentFault("npm is not in PATH", hint="install Node.js, which brings it")
        quiet = ["--no-fund", "--no-audit", "--no-update-notifier"]
        # Scripts of packages would run here, outside of any sandbox.
        return [[npm, "install", "--ignore-scripts", *quiet, "--prefix", str(place), *install.packages]]
    python = str(place / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]
    pip += ["--only-binary=:all:"]  # the others' setup would run here
    commands = [[sys.executable, "-m", "venv", str(place)], [*pip, *install.packages]]
    return [*commands, [*pip, "--no-deps", *install.bare]] if install.bare else commands


async def _run(command: list[str], place: Path) -> None:
    env = {**os.environ, "npm_config_cache": str(place / ".npm"), "PIP_NO_CACHE_DIR": "1"}
    env.pop("PYTHONPATH", None)
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=place,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(INSTALL_S):
            said, _ = await process.communicate()
    except TimeoutError:
        raise EnvironmentFault(f"{command[0]} did not end in {INSTALL_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        text = said.decode("utf-8", "replace").strip()[-_SAID:]
        raise EnvironmentFault(f"{Path(command[0]).name} failed: {text}", hint="can it reach its registry?")
    shutil.rmtree(place / ".npm", ignore_errors=True)


def _node() -> Path | None:
    found = shutil.which("node")
    return Path(found).resolve() if found else None
