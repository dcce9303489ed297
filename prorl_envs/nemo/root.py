"""A folder from which `gym` runs our environments on one prepared virtual environment.

NeMo Gym finds a server by its folder `<root>/resources_servers/<name>`, where a root is the current directory
or the folder it is installed in; and it makes a virtual environment for each server, which takes minutes and
a gigabyte, unless it is shown one. Hence:

    ROOT/venvs/<kind>/<name>/.venv                                links to the prepared virtual environment
    ROOT/resources_servers/prorl_bash/{app.py,configs,data,...}   links into envs/bash

The second tree is for a package that is not installed beside NeMo Gym but only importable. An installed one
has its folders there already, and NeMo Gym refuses a name that it finds twice.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import prorl_envs
from prorl_envs.errors import InputError
from prorl_envs.nemo.rows import PREFIX, server_name

#: The folder of our agent, in a checkout.
AGENT = Path(prorl_envs.__file__).resolve().parents[1] / "agents" / "prorl_agent"

#: The servers, beside our families', that our configs name, and those users put beside them.
NEMO_SERVERS = (
    "responses_api_agents/simple_agent",
    "responses_api_agents/gymnasium_agent",
    "responses_api_agents/prorl_agent",
    "responses_api_models/openai_model",
    "responses_api_models/vllm_model",
    "environment_servers/legacy_agent",
)


@dataclass(frozen=True, slots=True)
class GymRoot:
    """A root folder and how to use it.

    Args:
        path: run `gym` in this directory, or give it as `--search-dir`.
        flags: for `gym env start` and `gym eval run`: use the prepared virtual environment.
    """

    path: Path
    flags: tuple[str, ...]


def gym_root(path: Path, *, venv: Path | None = None) -> GymRoot:
    """Make or refresh a root at `path`. Idempotent.

    Args:
        path: the folder; made where missing. It must hold no `pyproject.toml`: NeMo Gym takes a folder with
            one for its own checkout, and then no longer installs the version of itself that is running.
        venv: virtual environment with NeMo Gym and this package; None takes the running one.

    Raises:
        InputError: `path` holds a `pyproject.toml` or something that is in the way, or `venv` is none.
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
    servers = {f"resources_servers/{server_name(folder.name)}": folder for folder in _families()}
    if AGENT.is_dir():  # in a checkout
        servers[f"responses_api_agents/{AGENT.name}"] = AGENT
    for name, folder in servers.items():
        installed = any(venv.glob(f"lib/python3*/site-packages/{name}/app.py"))
        _link_entries({} if installed else _entries(folder), path / name)
    # Those that other packages brought are installed, so only their virtual environment is to be shown.
    others = venv.glob(f"lib/python3*/site-packages/resources_servers/{PREFIX}*/app.py")
    for name in {**servers, **dict.fromkeys(f"resources_servers/{app.parent.name}" for app in others)}:
        _link(venv, path / "venvs" / name / ".venv")
    for name in NEMO_SERVERS:
        _link(venv, path / "venvs" / name / ".venv")
    return GymRoot(path, ("+skip_venv_if_present=true", f"+uv_venv_dir={path / 'venvs'}"))


def _families() -> Iterable[Path]:
    """The folders of the built-in families, where this package's code lies."""
    envs = Path(prorl_envs.__file__).parent / "envs"
    return sorted(app.parent for app in envs.resolve().glob("*/app.py"))


def _entries(folder: Path) -> dict[str, Path]:
    return {entry.name: entry for entry in folder.iterdir() if entry.name != "__pycache__"}


def _link_entries(wanted: Mapping[str, Path], target: Path) -> None:
    """A real folder with a link per entry, none if there are none. A link to the folder would be resolved by
    NeMo Gym, which would then meet the checkout's `pyproject.toml` above it."""
    target.mkdir(parents=True, exist_ok=True)
    for stale in target.iterdir():
        if stale.is_symlink() and stale.name not in wanted:
            stale.unlink()
    for name, entry in wanted.items():
        _link(entry, target / name)
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
