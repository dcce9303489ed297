"""Which driver starts the sandboxes of this machine."""

import os
import subprocess
from pathlib import Path
from typing import Any

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.apptainer import ApptainerDriver
from prorl_envs.sandbox.apptainer_probe import find_apptainer, start_check
from prorl_envs.sandbox.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.driver import NodeDriver
from prorl_envs.sandbox.files import node_local_base
from prorl_envs.sandbox.instance import InstanceDriver
from prorl_envs.sandbox.instance_probe import instance_check
from prorl_envs.sandbox.local import LocalDriver
from prorl_envs.sandbox.namespaces import NamespaceDriver
from prorl_envs.sandbox.probe import Check, enclosure_check, find_bwrap, isolation_check

#: What can be asked for by name. `auto` is the first that works of those that isolate.
DRIVERS = ("auto", "namespaces", "bubblewrap", "apptainer", "instance", "local")


def choose_driver(
    wanted: str | None = None,
    root: Path | None = None,
    *,
    bwrap: Path | None = None,
    apptainer: Path | None = None,
) -> str:
    """The name of the driver to use. Blocks: for some 40 ms where a sandbox needs no other
    program, some 500 ms otherwise.

    Args:
        wanted: one of DRIVERS; None takes `$PRORL_DRIVER`, else `auto`. One that is named is not tried.
        root: see `NodeDriver`.
        bwrap: see `BubblewrapDriver`.
        apptainer: see `ApptainerDriver`.

    Raises:
        SandboxError: there is no such driver; or `auto`, and none works, with the reasons.
    """
    name = wanted or os.environ.get("PRORL_DRIVER") or "auto"
    if name not in DRIVERS:
        raise SandboxError(f"there is no driver {name!r}", hint=f"there are: {', '.join(DRIVERS)}")
    if name != "auto":
        return name
    tried = {}
    if bwrap is None and not os.environ.get("PRORL_BWRAP"):  # a program that is named is meant
        tried["namespaces"] = enclosure_check()
        if tried["namespaces"].ok:
            return "namespaces"
    direct = _try_bubblewrap(bwrap)
    if direct.ok:
        return "bubblewrap"
    indirect = _try_apptainer(root, bwrap, apptainer)
    if indirect.ok:
        return "apptainer"
    alone = instance_check(root or node_local_base(), apptainer)
    if alone.ok:
        return "instance"
    tried |= {"bubblewrap": direct, "apptainer": indirect, "instance": alone}
    found = "; ".join(f"{name}: {check.found}" for name, check in tried.items())
    remedies = "; ".join(f"{name}: {check.remedy}" for name, check in tried.items())
    raise SandboxError(
        f"no driver works on this machine: {found}",
        hint=f"{remedies}; `prorl-envs doctor` says more. "
        "For code you trust, `PRORL_DRIVER=local` runs it without any isolation",
    )


def make_driver(
    name: str,
    root: Path | None = None,
    *,
    bwrap: Path | None = None,
    apptainer: Path | None = None,
    **options: Any,
) -> NodeDriver[Any]:
    """The driver of that name, as `choose_driver` returned it.

    Args:
        options: passed on to the driver.

    Raises:
        SandboxError: its program is missing, or no directory can be made.
    """
    if name == "namespaces":
        return NamespaceDriver(root, **options)
    if name == "bubblewrap":
        return BubblewrapDriver(root, bwrap=bwrap, **options)
    if name == "apptainer":
        return ApptainerDriver(root, apptainer=apptainer, bwrap=bwrap, **options)
    if name == "instance":
        return InstanceDriver(root, apptainer=apptainer, **options)
    return LocalDriver(root, **options)


def _try_bubblewrap(bwrap: Path | None) -> Check:
    try:
        return isolation_check(find_bwrap(bwrap))
    except SandboxError as error:
        return Check(name="bubblewrap", ok=False, found=error.message, remedy=error.hint)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(
            name="bubblewrap", ok=False, found=str(error), remedy="name another binary in PRORL_BWRAP"
        )


def _try_apptainer(root: Path | None, bwrap: Path | None, apptainer: Path | None) -> Check:
    try:
        return start_check(find_apptainer(apptainer), root or node_local_base(), bwrap)
    except SandboxError as error:
        return Check(name="apptainer", ok=False, found=error.message, remedy=error.hint)
