"""Mounts that make this Python, with its installed packages, work inside a sandbox.

A forked IPython imports lazily (parts of the standard library, numpy's submodules), so the files it was
started from must have the same paths inside. Packages with tasks or solutions must not be visible there.
"""

import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import prorl_envs
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.filesystem.mount_plan import DEFAULT_ENV

#: Installed packages that hold graders and reference solutions: ours and NeMo Gym's.
HIDDEN_PACKAGES = ("prorl_envs", "resources_servers", "environments", "responses_api_agents")

#: Entry point group of other packages' environments (see `env/registry.py`), which hold solutions too.
_GROUP = "prorl_envs.environments"
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_SYSTEM = Path("/usr")


def python_runtime() -> tuple[tuple[Mount, ...], tuple[str, ...], dict[str, str]]:
    """Return the parts of a `SandboxSpec` with which this interpreter runs inside.

    A checkout is never mounted: the source of an editable installation stays invisible.

    Returns:
        Read-only mounts, masks that hide `hidden_packages`, and environment variables.
    """
    paths = [Path(sys.base_prefix), *package_folders()]
    if sys.prefix != sys.base_prefix:
        paths += [Path(sys.prefix, "bin"), Path(sys.prefix, "pyvenv.cfg")]
    mounts = tuple(Mount(source=path, target=str(path)) for path in _outermost(paths))
    # A virtual environment's base interpreter may have packages of its own.
    base = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": sys.base_prefix}))
    masks = tuple(mask for folder in {base, *package_folders()} for mask in hidden_in(folder))
    env = {"PATH": f"{Path(sys.prefix, 'bin')}:{DEFAULT_ENV['PATH']}"}
    if library_path := _visible_library_path(mounts):
        env["LD_LIBRARY_PATH"] = library_path
    return mounts, masks, env


def python_spec() -> SandboxSpec:
    """Return the spec of a sandbox in which this interpreter runs."""
    mounts, masks, env = python_runtime()
    return SandboxSpec(mounts=mounts, masks=masks, env=env)


def system_masks(system: Path = _SYSTEM) -> tuple[str, ...]:
    """Return masks for the `hidden_packages` below `system`, which every sandbox sees.

    Includes the folder of this package, even if it is installed or checked out in an unusual place there.
    """
    patterns = ("lib*/python3*/*-packages", "local/lib*/python3*/*-packages")
    folders = dict.fromkeys(folder for pattern in patterns for folder in system.glob(pattern))
    ours = [Path(path).resolve() for path in prorl_envs.__path__]
    folders |= dict.fromkeys((*package_folders(), *(path.parent for path in ours)))
    masks = [Path(mask).resolve() for folder in folders for mask in hidden_in(folder)]
    # In a checkout, the environment families are beside the package, which has a link to them.
    masks += [families.resolve() for path in ours if (families := path / "envs").is_symlink()]
    return tuple(str(mask) for mask in dict.fromkeys(masks) if mask.is_relative_to(system))


def package_folders() -> tuple[Path, ...]:
    """Return the folders of installed packages that this interpreter imports from."""
    candidates = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    candidates += [str(Path(folder).parent) for folder in prorl_envs.__path__]
    found = {Path(path): None for path in candidates if Path(path).name in _PACKAGE_FOLDERS}
    return tuple(path for path in found if path.is_dir())


@cache
def hidden_packages() -> tuple[str, ...]:
    """Return HIDDEN_PACKAGES and all other packages that provide environments."""
    others = {point.module.partition(".")[0] for point in entry_points(group=_GROUP)}
    return (*HIDDEN_PACKAGES, *sorted(others - {*HIDDEN_PACKAGES}))


def hidden_in(folder: Path) -> Iterator[str]:
    """Yield the masks for one folder of installed packages."""
    for name in hidden_packages():
        if (folder / name).is_dir():
            yield str(folder / name)


def _visible_library_path(mounts: tuple[Mount, ...]) -> str:
    """Return the folders of LD_LIBRARY_PATH that are visible inside: some interpreters need it to start."""
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    return ":".join(
        folder for folder in folders if any(Path(folder).is_relative_to(mount.source) for mount in mounts)
    )


def _outermost(paths: list[Path]) -> list[Path]:
    """Return existing paths that are not visible below /usr, and not below another of the paths."""
    wanted = [path for path in dict.fromkeys(paths) if path.exists() and not path.is_relative_to(_SYSTEM)]
    return [
        path for path in wanted if not any(path != other and path.is_relative_to(other) for other in wanted)
    ]
