"""Checks of Apptainer or SingularityCE: installation, version, settings, and requirements of images."""

import contextlib
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prorl_envs.errors import SandboxError, UnsupportedMachine
from prorl_envs.sandbox.drivers.apptainer_wrapper import (
    explain_wrapper,
    run_apptainer,
    wrapper_command,
    write_container,
)
from prorl_envs.sandbox.drivers.probe import Check, find_bwrap, isolation_command, tried
from prorl_envs.sandbox.filesystem.directories import node_local_base
from prorl_envs.sandbox.filesystem.sif_mounts import find_program

_NAMES = ("apptainer", "singularity")
_INSTALL_REMEDY = (
    "on a cluster, load its module (`module load apptainer`); else install Apptainer 1.2 or later, or name "
    "the program in PRORL_APPTAINER"
)

#: The oldest versions with the options used here, by the first word of the output of `--version`.
_MINIMUM = {"apptainer": (1, 2), "singularity-ce": (3, 11)}
_PRODUCTS = {"apptainer": "Apptainer", "singularity-ce": "SingularityCE", "singularity": "Singularity"}
_VERSION = re.compile(r"(apptainer|singularity-ce|singularity)(?:-ce)? version (\d+(?:\.\d+)+)")

#: Settings without which sandboxes cannot start. Apptainer's default is `yes` for each.
_NEEDED = ("allow user ns", "allow container dir", "user bind control")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Properties of an installed Apptainer.

    Args:
        product: the first word of the output of `--version`, such as `apptainer`; empty if unknown.
        version: the numbers of its version.
        setuid: whether its setuid program is installed and allowed. Only `InstanceDriver` uses it.
        forbidden: settings of its configuration that prevent sandboxes, each with the required value.
    """

    product: str
    version: tuple[int, ...]
    setuid: bool
    forbidden: tuple[str, ...]

    @property
    def supported(self) -> bool:
        """True if the product and version can start sandboxes."""
        return self.product in _MINIMUM and self.version >= _MINIMUM[self.product]


def find_apptainer(chosen: Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the program: `chosen`, `$PRORL_APPTAINER`, else `apptainer` or `singularity` in PATH.

    Args:
        environ: the environment with these variables.

    Raises:
        SandboxError: no such program is installed.
    """
    named = chosen or environ.get("PRORL_APPTAINER")
    if named:
        if not os.access(named, os.X_OK):
            raise UnsupportedMachine(f"PRORL_APPTAINER is not a program: {named}", hint=_INSTALL_REMEDY)
        return Path(named).absolute()
    for name in _NAMES:
        if found := shutil.which(name, path=environ.get("PATH")):
            return Path(found)
    raise UnsupportedMachine("neither Apptainer nor Singularity is installed", hint=_INSTALL_REMEDY)


def read_installation(program: Path) -> Installation:
    """Run the program to read its version and settings.

    Raises:
        SandboxError: the program cannot be run.
    """
    found = _VERSION.search(_output(program, "--version"))
    product, numbers = (found[1], found[2]) if found else ("", "0")
    built = _build_settings(_output(program, "buildcfg"))
    configured = _configured(built)
    return Installation(
        product=product,
        version=tuple(map(int, numbers.split("."))),
        setuid=_has_setuid(built) and configured.get("allow setuid", "yes") != "no",
        forbidden=tuple(f"{name} = yes" for name in _NEEDED if configured.get(name, "yes") == "no"),
    )


def uses_setuid(program: Path) -> bool:
    """Return True if Apptainer uses its setuid program for this user: never for root. Blocks."""
    return os.geteuid() != 0 and read_installation(program).setuid


def apptainer_checks(
    base: Path | None = None, chosen: Path | None = None, bwrap: Path | None = None
) -> Iterator[Check]:
    """Check Apptainer; the last check tries to start a sandbox. Blocks.

    Args:
        base, bwrap: see `probe.bubblewrap_checks` and `BubblewrapDriver`.
        chosen: the program that drivers would use; None for the default.
    """
    try:
        program = find_apptainer(chosen)
        installation = read_installation(program)
    except SandboxError as error:
        yield Check(name="apptainer", ok=False, found=error.message, remedy=error.hint)
        return
    yield _product(program, installation)
    if installation.forbidden:
        yield Check(
            name="apptainer settings",
            ok=False,
            found=f"not set: {', '.join(installation.forbidden)}",
            remedy="the administrator must set them in Apptainer's configuration",
        )
    yield tried("apptainer start", lambda: try_start(program, node_local_base(base), find_bwrap(bwrap)))


def image_checks() -> Iterator[Check]:
    """Check the requirements of SIF images, which are the same for all drivers."""
    problems = []
    try:
        for names in (("squashfuse_ll", "squashfuse"), ("fusermount3", "fusermount"), ("flock",)):
            find_program(*names)
    except SandboxError as error:
        problems.append(error.message)
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        problems.append("/dev/fuse is not accessible to this user")
    yield Check(
        name="SIF images",
        ok=not problems,
        found="; ".join(problems) or "can be mounted",
        remedy="install squashfuse, fuse3 and util-linux and make /dev/fuse accessible to this user; image "
        "directories (`apptainer build --sandbox DIRECTORY IMAGE`) work without",
    )
    entries = subordinate_id_files()
    yield Check(
        name="image builds",
        ok=os.geteuid() == 0 or len(entries) == 2,
        found="as root"
        if os.geteuid() == 0
        else f"{len(entries)} of 2 entries in /etc/subuid and /etc/subgid",
        remedy="no sandbox needs them; `apptainer build` may, for packages that create users",
    )


def subordinate_id_files() -> list[str]:
    """Return those of `/etc/subuid` and `/etc/subgid` that have an entry of this user."""
    names = {str(os.geteuid())}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(os.geteuid()).pw_name)
    found = []
    for file in ("/etc/subuid", "/etc/subgid"):
        with contextlib.suppress(OSError):
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
            if any(line.partition(":")[0] in names for line in lines):
                found.append(file)
    return found


def try_start(program: Path, base: Path, bwrap: Path) -> str:
    """Start a sandbox with Apptainer below `base`: see `tried`."""
    with tempfile.TemporaryDirectory(dir=base) as scratch:
        container = Path(scratch, "apptainer")
        write_container(container)
        done = run_apptainer([*wrapper_command(program, container), *isolation_command(bwrap)], container)
    if done.returncode != 0:
        raise explain_wrapper(done.stdout + done.stderr)
    return "works"


def _product(program: Path, installation: Installation) -> Check:
    name = _PRODUCTS.get(installation.product, "an unknown product")
    version = ".".join(map(str, installation.version))
    how = (
        "with a setuid program, used by the driver `apptainer-instance` alone"
        if installation.setuid
        else "without setuid"
    )
    return Check(
        name="apptainer",
        ok=installation.supported,
        found=f"{name} {version} at {program}, {how}",
        remedy="Apptainer 1.2 or later, or SingularityCE 3.11 or later",
    )


def _output(program: Path, command: str) -> str:
    try:
        with tempfile.TemporaryDirectory() as home:
            return run_apptainer([program, command], Path(home)).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"cannot run {program}: {error}", hint=_INSTALL_REMEDY) from error


def _build_settings(text: str) -> dict[str, str]:
    """Parse build settings. Return them by the part of their names that both products share: CONF_FILE."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {re.sub("^(APPTAINER|SINGULARITY)_", "", key): value for key, _, value in pairs}


def _has_setuid(built: dict[str, str]) -> bool:
    for name in _NAMES:
        starter = Path(built.get("LIBEXECDIR", "/nonexistent"), name, "bin", "starter-suid")
        try:
            found = starter.stat()
        except OSError:
            continue
        if found.st_uid == 0 and found.st_mode & stat.S_ISUID:
            return True
    return False


def _configured(built: dict[str, str]) -> dict[str, str]:
    """Return the site's settings; empty if this user may not read them (a failed start shows the reason)."""
    try:
        text = Path(built.get("CONF_FILE", "/nonexistent")).read_text(errors="replace")
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {key.strip(): value.strip() for key, _, value in pairs}
