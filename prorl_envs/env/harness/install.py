"""Installation of a harness's packages into the cache, once per machine. Sandboxes mount the packages and
download nothing."""

import asyncio
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path

from prorl_envs.env.harness.recipe import INSTALLED, Install, Recipe
from prorl_envs.errors import EnvironmentFault
from prorl_envs.images.layers import LayerStore
from prorl_envs.images.threads import in_thread
from prorl_envs.sandbox.base import Mount
from prorl_envs.sandbox.filesystem.layer_leases import LAYERS
from prorl_envs.sandbox.filesystem.python_runtime import hidden_in

#: Timeout of an installation, in seconds.
INSTALL_S = 1800.0
#: Characters of the client's output that an error shows, and maximum bytes of one line of that output.
_SHOWN_CHARS = 2000
_LINE_BYTES = 1 << 20
_SYSTEM = Path("/usr")
#: Store of the packages, in the cache.
_STORE = "harnesses"


@dataclass(frozen=True, slots=True)
class Installed:
    """Files of a harness that a sandbox sees.

    Args:
        mounts: read-only mounts.
        masks: parts of the mounts that stay hidden.
        path: directories to prepend to `PATH`.
    """

    mounts: tuple[Mount, ...] = ()
    masks: tuple[str, ...] = ()
    path: tuple[str, ...] = ()


def place_of(recipe: Recipe, cache_dir: Path) -> Path:
    """Return the directory of a recipe's packages, which depends on the packages and the Python version."""
    install = recipe.install
    packages = [install.registry, *install.packages, *install.bare] if install else []
    key = json.dumps([*packages, sys.version, platform.machine()] if packages else [])
    name = f"{recipe.name}-{blake2s(key.encode(), digest_size=6).hexdigest()}"
    return cache_dir / _STORE / LAYERS / name


def missing(recipe: Recipe, cache_dir: Path) -> str:
    """Return why the harness cannot run on this machine, or ""."""
    if recipe.install is None:
        return ""
    if recipe.install.node and _node() is None:
        return f"the harness {recipe.name} needs Node.js, which is not in PATH"
    if not place_of(recipe, cache_dir).is_dir():
        return f"the harness {recipe.name} is not installed: prorl-envs harness install {recipe.name}"
    return ""


def installed(recipe: Recipe, cache_dir: Path) -> Installed:
    """Return the mounts and paths of an installed harness.

    Raises:
        EnvironmentFault: the harness is not installed.
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


async def install(
    recipe: Recipe,
    cache_dir: Path,
    progress: Callable[[str], None],
    on_output: Callable[[str], None] = lambda line: None,
) -> Path:
    """Install a recipe's packages, unless they are installed. A lock allows one installation at a time.

    An installation that failed or was interrupted keeps its downloads for the next attempt.

    Args:
        progress: called with a short description of each step.
        on_output: receives each output line of the registry's client.

    Returns:
        the directory of the packages.

    Raises:
        EnvironmentFault: the registry's client failed, or is missing.
        SandboxError: the cache cannot be written.
    """
    place = place_of(recipe, cache_dir)
    if recipe.install is None or place.is_dir():
        return place
    store = LayerStore(cache_dir / _STORE)
    await in_thread(store.sweep)
    downloads = store.root / f"{place.name}.downloads"
    waiting = f"another process installs {recipe.name}: waiting"
    async with store.making(place.name, on_wait=lambda: progress(waiting)) as draft:
        if draft is None:
            return place
        progress(f"installing {', '.join(recipe.install.packages)}")
        for command in _commands(recipe.install, draft):
            await _run(command, draft, downloads, on_output)
    await in_thread(shutil.rmtree, downloads, ignore_errors=True)
    return place


def _commands(install: Install, place: Path) -> list[list[str]]:
    if install.registry == "npm":
        if (npm := shutil.which("npm")) is None:
            raise EnvironmentFault("npm is not in PATH", hint="install Node.js, which includes npm")
        options = ["--no-fund", "--no-audit", "--no-update-notifier", "--loglevel=http"]
        # Without --ignore-scripts, scripts of packages would run here, outside of any sandbox.
        return [[npm, "install", "--ignore-scripts", *options, "--prefix", str(place), *install.packages]]
    python = str(place / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    pip += ["--only-binary=:all:"]  # the setup code of source packages would run here, outside of any sandbox
    commands = [[sys.executable, "-m", "venv", str(place)], [*pip, *install.packages]]
    return [*commands, [*pip, "--no-deps", *install.bare]] if install.bare else commands


async def _run(command: list[str], place: Path, downloads: Path, on_output: Callable[[str], None]) -> None:
    caches = {"npm_config_cache": str(downloads / "npm"), "PIP_CACHE_DIR": str(downloads / "pip")}
    env = {**os.environ, **caches}
    for name in ("PYTHONPATH", "PIP_NO_CACHE_DIR", "PIP_QUIET"):
        env.pop(name, None)
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=place,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=_LINE_BYTES,
    )
    assert process.stdout is not None
    last = ""
    try:
        async with asyncio.timeout(INSTALL_S):
            async for line in process.stdout:
                text = line.decode("utf-8", "replace")
                last = (last + text)[-_SHOWN_CHARS:]
                on_output(text.rstrip())
            await process.wait()
    except TimeoutError:
        raise EnvironmentFault(f"{command[0]} did not exit within {INSTALL_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise EnvironmentFault(
            f"{Path(command[0]).name} failed: {last.strip()}",
            hint="can it reach its registry? the next attempt reuses the downloads",
        )


def _node() -> Path | None:
    found = shutil.which("node")
    return Path(found).resolve() if found else None
