"""Find out why a machine refuses user namespaces, and a remedy.

This file is also a program for Python 3.9 without packages. If this machine refuses user namespaces, it
prints the cause and the remedy and exits with 1. `scripts/setup.sh` runs it before it installs anything. With
`--limit` it prints the kind of namespace whose limit is reached.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

#: Namespaces of a sandbox: the flags of `clone(2)` by the names in `user.max_*_namespaces`.
_NAMESPACES = {
    "user": 0x1000_0000,
    "mnt": 0x2_0000,
    "pid": 0x2000_0000,
    "net": 0x4000_0000,
    "ipc": 0x800_0000,
    "uts": 0x400_0000,
    "cgroup": 0x200_0000,
}
_CAP_SYS_ADMIN = 21

#: Words of messages about a limit of namespaces: the kernel reports it as ENOSPC.
_LIMIT_WORDS = ("No space left on device", "ENOSPC", "number exceeded", "namespaces exceeded")
_CONTAINER_FILES = (".dockerenv", "run/.containerenv")
_KUBERNETES = "KUBERNETES_SERVICE_HOST"
_CONTAINER_VARIABLES = (_KUBERNETES, "container", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
_POD_REMEDY = "start the pod with an unconfined seccomp profile and `procMount: Unmasked`"
_CONTAINER_REMEDY = (
    "start the container with `--security-opt seccomp=unconfined --security-opt systempaths=unconfined`"
)
#: Start of bubblewrap's message about a refused namespace, and the guess that follows it.
_REFUSED, _GUESS = "No permissions to creat", "namespace, likely because "


class NamespaceRefusal(NamedTuple):
    """Why user namespaces, or the mounts in them, are refused.

    Args:
        cause: one sentence without a full stop.
        remedy: what the user or the administrator can do.
        lasting: whether every further attempt will be refused too.
    """

    cause: str
    remedy: str
    lasting: bool = True


def refusal_of(
    message: str,
    *,
    proc: Path = Path("/proc"),
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
) -> NamespaceRefusal:
    """Return why namespaces are refused here, from this machine's settings.

    Args:
        message: message of the call that failed; it becomes the cause if the settings show none.
        proc, root: the directories `/proc` and `/`.
        environ: this process's environment.
    """
    in_container = any((root / name).exists() for name in _CONTAINER_FILES) or any(
        name in environ for name in _CONTAINER_VARIABLES
    )
    place = ", on the container's host" if in_container else ""
    privileged = _has_capability(_CAP_SYS_ADMIN, proc)
    for kind in _NAMESPACES:
        if _setting(f"user/max_{kind}_namespaces", proc) == "0":
            return NamespaceRefusal(
                f"{kind} namespaces are disabled (user.max_{kind}_namespaces=0)",
                _limit_remedy(kind, place, proc),
            )
    if any(words in message for words in _LIMIT_WORDS):
        kind = _kind_at_limit()
        cause = f"the limit of {kind} namespaces is reached (user.max_{kind}_namespaces)" if kind else ""
        return NamespaceRefusal(
            cause or _plain(message), _limit_remedy(kind or "user", place, proc), lasting=False
        )
    if _setting("kernel/unprivileged_userns_clone", proc) == "0" and not privileged:
        return NamespaceRefusal(
            "only root may create user namespaces (kernel.unprivileged_userns_clone=0)",
            f"as root{place}: `sysctl kernel.unprivileged_userns_clone=1`",
        )
    if _in_chroot(proc):
        return NamespaceRefusal(
            "this process runs in a chroot, where the kernel refuses user namespaces",
            "run it outside, or enter the directory as a container (`bwrap`, `systemd-nspawn`) instead",
        )
    if in_container and _is_denial(message):
        remedy = _POD_REMEDY if _KUBERNETES in environ else _CONTAINER_REMEDY
        return NamespaceRefusal(f"this container may not create sandboxes: {_plain(message)}", remedy)
    if _setting("kernel/apparmor_restrict_unprivileged_userns", proc) == "1" and not privileged:
        return NamespaceRefusal(
            "AppArmor restricts user namespaces (kernel.apparmor_restrict_unprivileged_userns=1)",
            "as root: `sysctl kernel.apparmor_restrict_unprivileged_userns=0`, or an AppArmor profile that "
            "allows `userns` to this program",
        )
    return NamespaceRefusal(
        _plain(message),
        "this machine must allow user namespaces: see docs/troubleshooting.md",
        lasting=_is_denial(message),
    )


def _limit_remedy(kind: str, place: str, proc: Path) -> str:
    name = f"max_{kind}_namespaces"
    value = _setting(f"user/{name}", proc)
    limit = max(65536, 2 * int(value) if value.isdigit() else 0)
    return f"as root{place}: `sysctl user.{name}={limit}`"


def _kind_at_limit() -> str:
    """Return the kind of namespace whose limit is reached; "" if there is none. Blocks for some 20 ms."""
    command = [sys.executable, "-I", "-S", __file__, "--limit"]  # no fork here: this process may have threads
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _is_denial(message: str) -> bool:
    return any(word in message.lower() for word in ("permi", "denied"))


def _plain(message: str) -> str:
    """Replace the error text of ENOSPC, which means a limit here, and bubblewrap's guess at a cause."""
    if _REFUSED in message and _GUESS in message:
        return "the kernel refuses new namespaces"
    return message.replace(
        "No space left on device", "the kernel's limit of namespaces is reached (user.max_*)"
    )


def _setting(name: str, proc: Path) -> str:
    try:
        return (proc / "sys" / name).read_text().strip()
    except OSError:
        return ""


def _has_capability(number: int, proc: Path) -> bool:
    try:
        lines = (proc / "self/status").read_text().splitlines()
    except OSError:
        return False
    fields = dict(line.partition(":\t")[::2] for line in lines)
    return bool(int(fields.get("CapEff", "0"), 16) >> number & 1)


def _in_chroot(proc: Path) -> bool:
    """Return whether this process runs in a chroot: its root directory is no mount point, or is a mount that
    the first process sees below its own root directory."""
    here, init = (_mount_points(proc / name / "mountinfo") for name in ("self", "1"))
    roots = [number for number, place in here.items() if place == "/"]
    return bool(here) and all(init.get(number, "/") != "/" for number in roots)


def _mount_points(mountinfo: Path) -> dict[str, str]:
    """Parse a `mountinfo` file. Return mount points by mount number; empty if it cannot be read."""
    try:
        lines = mountinfo.read_bytes().split(b"\n")  # not `splitlines`: paths contain other line ends
    except OSError:
        return {}
    fields = (os.fsdecode(line).split(" ") for line in lines if line)
    return {number: place for number, _, _, _, place, *_ in fields}


def _create_namespaces(flags: int) -> int:
    """Create a user namespace and others in a child. Return the number of the error, or 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()
    if child == 0:
        os._exit(ctypes.get_errno() if libc.unshare(_NAMESPACES["user"] | flags) else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """Exit with 1 if this machine refuses namespaces, and print why and what to do."""
    if "--limit" in sys.argv:
        full = (kind for kind, flag in _NAMESPACES.items() if _create_namespaces(flag) == errno.ENOSPC)
        sys.stdout.write(next(full, ""))
    elif number := _create_namespaces(sum(_NAMESPACES.values())):
        refusal = refusal_of(f"new namespaces: {os.strerror(number)}")
        sys.exit(f"error: this machine cannot start sandboxes: {refusal.cause}\nhint: {refusal.remedy}")


if __name__ == "__main__":
    main()
