"""Selection of the driver that starts the sandboxes of this machine."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prorl_envs.errors import UnsupportedMachine
from prorl_envs.sandbox.drivers.apptainer import ApptainerDriver
from prorl_envs.sandbox.drivers.apptainer_probe import find_apptainer, try_start
from prorl_envs.sandbox.drivers.base import NodeDriver
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.drivers.instance.driver import InstanceDriver
from prorl_envs.sandbox.drivers.instance.probe import try_instance
from prorl_envs.sandbox.drivers.local import LocalDriver
from prorl_envs.sandbox.drivers.probe import find_bwrap, tried, try_isolation
from prorl_envs.sandbox.filesystem.directories import node_local_base

#: Valid driver names. `auto` selects the first isolating driver that works.
DRIVERS = ("auto", "bubblewrap", "apptainer", "apptainer-instance", "local")

#: Drivers whose sandboxes start from layered images.
LAYERED_DRIVERS = ("bubblewrap",)


def choose_driver(
    wanted: str | None = None,
    root: Path | None = None,
    *,
    bwrap: Path | None = None,
    apptainer: Path | None = None,
) -> str:
    """Return the name of the driver to use. Blocks: 5 ms if bubblewrap works, else 500 ms.

    Args:
        wanted: one of DRIVERS; None takes `$PRORL_DRIVER`, else `auto`. A named driver is not tested.
        root: see `NodeDriver`.
        bwrap: see `BubblewrapDriver`.
        apptainer: see `ApptainerDriver`.

    Raises:
        UnsupportedMachine: there is no such driver, or none works (for `auto`), with the cause and a remedy.
    """
    name = wanted or os.environ.get("PRORL_DRIVER") or "auto"
    if name not in DRIVERS:
        raise UnsupportedMachine(
            f"there is no driver {name!r}", hint=f"the drivers are: {', '.join(DRIVERS)}"
        )
    if name != "auto":
        return name
    base = node_local_base(root)
    attempts: dict[str, Callable[[], str]] = {
        "bubblewrap": lambda: try_isolation(find_bwrap(bwrap)),
        "apptainer": lambda: try_start(find_apptainer(apptainer), base, find_bwrap(bwrap)),
        "apptainer-instance": lambda: try_instance(base, apptainer),
    }
    failed = []
    for name, attempt in attempts.items():
        check = tried(name, attempt)
        if check.ok:
            return name
        failed.append(check)
    raise UnsupportedMachine(
        f"this machine cannot start sandboxes: {failed[0].found}",
        hint="`module load apptainer`" if _has_modules() else failed[0].remedy,
    )


def _has_modules() -> bool:
    """Return whether users of this cluster load programs as modules, and Apptainer is not loaded."""
    installed = shutil.which("apptainer") or shutil.which("singularity")
    return not installed and any(name in os.environ for name in ("LMOD_CMD", "MODULESHOME"))


def make_driver(
    name: str,
    root: Path | None = None,
    *,
    bwrap: Path | None = None,
    apptainer: Path | None = None,
    **options: Any,
) -> NodeDriver[Any]:
    """Return the driver with the name that `choose_driver` returned.

    Args:
        options: passed on to the driver.

    Raises:
        SandboxError: the driver's program is missing, or no directory can be created.
    """
    if name == "bubblewrap":
        return BubblewrapDriver(root, bwrap=bwrap, **options)
    if name == "apptainer":
        return ApptainerDriver(root, apptainer=apptainer, bwrap=bwrap, **options)
    if name == "apptainer-instance":
        return InstanceDriver(root, apptainer=apptainer, **options)
    return LocalDriver(root, **options)
