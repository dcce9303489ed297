"""The permissions that a builder (Apptainer) runs with, and hints for its failures."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.drivers.apptainer_probe import subordinate_id_files

#: Parts of a builder's output, and the hint for them. The first match counts.
_FULL = (("no space left on device",), "free some disk, or set run_dir to a larger local one")
_PULLING = (
    _FULL,
    (
        ("no such host", "connection refused", "i/o timeout", "network is unreachable", "failure in name"),
        "this machine cannot reach the registry: pull the image where there is a network, and give the SIF",
    ),
    (
        ("unauthorized", "authentication required", "access denied", "access to the resource is denied"),
        "set APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD, or run `apptainer registry login`",
    ),
    (
        ("has no library client",),
        "Apptainer knows no library by default: `apptainer remote add --no-login NAME cloud.sylabs.io`",
    ),
    (("manifest unknown", "name unknown", "404 not found"), "check the image's name and tag"),
)
_BUILDING = (
    _FULL,
    (
        ("lchown", "change uid and gids", "operation not permitted: chown"),
        "files of other owners need subordinate ids: ask for `usermod --add-subuids 100000-165535 "
        "--add-subgids 100000-165535 USER`, or build where you have them",
    ),
    (
        (
            "creating namespace",
            "create user namespace",
            "no user namespace available",
            "clone: operation not permitted",
            "unshare: ",
        ),
        "this machine allows no user namespaces: build on another one, and copy the SIF here",
    ),
    (("mksquashfs not found", '"mksquashfs": executable file not found'), "install squashfs-tools"),
    (
        ("could not resolve", "temporary failure in name resolution", "temporary failure resolving"),
        "the definition's commands need a network, and this machine has none",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """Permissions of this user that matter for builds.

    Args:
        root: the user is root, of the machine or of a container.
        capable: the user has all capabilities; a container's root often lacks some.
        subordinate: the user has subordinate ids, and the program that maps them is installed.
    """

    root: bool
    capable: bool
    subordinate: bool

    @property
    def identity(self) -> bool:
        """True if the build must run in a user namespace that maps every id to itself. Apptainer runs a
        definition's commands only with all capabilities. Root has them in such a namespace, and the map keeps
        the owners of files."""
        return self.root and not self.capable

    @property
    def unpack_base(self) -> bool:
        """True if base images must be unpacked before the build. If only the user's own id is mapped, a build
        cannot store files of other owners; unpacked without a definition, all files belong to the user."""
        return not self.root and not self.subordinate


def rights() -> Rights:
    """Return the permissions of this process on this machine."""
    status = Path("/proc/self/status").read_text()
    permitted = int(next(line for line in status.splitlines() if line.startswith("CapPrm")).split()[1], 16)
    last_capability = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    return Rights(
        root=os.geteuid() == 0,
        capable=permitted == (1 << last_capability + 1) - 1,
        subordinate=len(subordinate_id_files()) == 2 and shutil.which("newuidmap") is not None,
    )


def failure(action: str, status: int, output: str, *, remote: bool) -> SandboxError:
    """Return the error for a builder's exit status, with the end of its output and a hint.

    Args:
        remote: True if the builder was pulling, False if it was building.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    fatal = next((line for line in reversed(lines) if line.startswith(("FATAL", "ERROR"))), "")
    end = "\n".join(lines[-25:])[-3000:]
    low = f"{fatal}\n{end}".lower()
    remedies = _PULLING if remote else _BUILDING
    hint = next((help for signs, help in remedies if any(sign in low for sign in signs)), "")
    return SandboxError(
        f"{action} failed with status {status}; end of its output:\n{end}", hint=hint or "see its last lines"
    )
