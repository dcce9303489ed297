"""Folder from which `gym` runs our environments with one prepared virtual environment.

NeMo Gym finds a server by its folder `<root>/resources_servers/<name>`. A root is the current directory, or
the folder in which NeMo Gym is installed. By default, NeMo Gym creates a virtual environment for each server,
which takes minutes and a gigabyte. With this folder, it uses an existing virtual environment:

    ROOT/venvs/<kind>/<name>/.venv                                links to the prepared virtual environment
    ROOT/resources_servers/prorl_bash/{app.py,configs,data,...}   links into envs/bash/nemo/server
    ROOT/environments/prorl_bash/{config,manifest}.yaml           links into envs/bash/nemo/environment

The last two trees are for a package that is not installed beside NeMo Gym but only importable. An installed
package has its folders there already, and NeMo Gym refuses duplicate names.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import prorl_envs
from prorl_envs.errors import InputError
from prorl_envs.nemo.rows import BUILT_IN, PREFIX, server_name

#: Location of this package: a checkout, or a folder into which it was installed.
_HOME = Path(prorl_envs.__file__).resolve().parents[1]

#: Servers of NeMo Gym that our configs name, or that users combine with our servers.
NEMO_SERVERS = (
    "responses_api_agents/simple_agent",
    "responses_api_agents/gymnasium_agent",
    "responses_api_agents/prorl_agent",
    "responses_api_models/openai_model",
    "responses_api_models/vllm_model",
    "environment_servers/legacy_agent",
    "environment_servers/prorl_rollouts",
    "environment_servers/single_agent_turn",
    "environment_servers/single_agent_turn_legacy",
)


@dataclass(frozen=True, slots=True)
class GymRoot:
    """A root folder and its usage.

    Args:
        path: directory in which to run `gym`, or to pass as `--search-dir`.
        flags: options for `gym env start` and `gym eval run` that select the prepared virtual environment.
    """

    path: Path
    flags: tuple[str, ...]


def gym_root(path: Path, *, venv: Path | None = None) -> GymRoot:
    """Create or refresh a root at `path`. Idempotent.

    Args:
        path: the folder; created if missing. It must not hold a `pyproject.toml`. Otherwise NeMo Gym takes
            the folder for its own checkout, and does not install its running version.
        venv: virtual environment with NeMo Gym and this package; None takes that of this process.

    Raises:
        InputError: `path` holds a `pyproject.toml` or conflicting files, or `venv` is not a virtual
            environment.
    """
    path = path.absolute()
    venv = (venv or Path(sys.prefix)).absolute()
    if (path / "pyproject.toml").exists():
        raise InputError(f"{path} holds a pyproject.toml", hint="choose an empty folder")
    for part in ("bin/python", "bin/activate"):
        if not (venv / part).exists():
            raise InputError(
                f"{venv} is not a virtual environment: it has no {part}",
                hint="run this with the Python of the environment in which NeMo Gym is installed",
            )
    folders = dict(_folders())
    for name, entries in folders.items():
        installed = any(venv.glob(f"lib/python3*/site-packages/{name}/"))
        _link_entries({} if installed else entries, path / name)
    # Servers of other packages are installed, so they only need the link to the virtual environment.
    pattern = f"resources_servers/{PREFIX}*/app.py"
    others = [*venv.glob(f"lib/python3*/site-packages/{pattern}"), *path.glob(pattern)]
    servers = [name for name, entries in folders.items() if "app.py" in entries]
    for name in {*servers, *(f"resources_servers/{app.parent.name}" for app in others), *NEMO_SERVERS}:
        _link(venv, path / "venvs" / name / ".venv")
    return GymRoot(path, ("+skip_venv_if_present=true", f"+uv_venv_dir={path / 'venvs'}"))


def _folders() -> Iterator[tuple[str, dict[str, Path]]]:
    """Yield the path below a root, and the entries, of each folder that NeMo Gym must find."""
    for family in BUILT_IN:
        server, environment = (
            f"{kind}/{server_name(family)}" for kind in ("resources_servers", "environments")
        )
        checkout = _HOME / "envs" / family
        if checkout.is_dir():
            yield server, _entries(checkout / "nemo" / "server") | {"README.md": checkout / "README.md"}
            yield environment, _entries(checkout / "nemo" / "environment")
        else:
            yield server, _entries(_HOME / server)
            yield environment, _entries(_HOME / environment)
    agent, rollouts = _HOME / "agents" / "prorl_agent", _HOME / "environment_servers" / "prorl_rollouts"
    if agent.is_dir():  # in a checkout
        yield f"responses_api_agents/{agent.name}", _entries(agent)
        yield f"environment_servers/{rollouts.name}", _entries(rollouts)


def _entries(folder: Path) -> dict[str, Path]:
    return {entry.name: entry for entry in folder.iterdir() if entry.name != "__pycache__"}


def _link_entries(entries: Mapping[str, Path], target: Path) -> None:
    """Create a folder with a link per entry; without entries, no folder. The folder is not a link itself:
    NeMo Gym would resolve the link, and find the checkout's `pyproject.toml` above the target."""
    target.mkdir(parents=True, exist_ok=True)
    for stale in target.iterdir():
        if stale.is_symlink() and stale.name not in entries:
            stale.unlink()
    for name, source in entries.items():
        _link(source, target / name)
    if not any(target.iterdir()):
        target.rmdir()


def _link(source: Path, link: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        if link.readlink() == source:
            return
        link.unlink()
    try:
        link.symlink_to(source)
    except FileExistsError as error:
        raise InputError(f"{link} is in the way", hint="choose an empty folder") from error
