"""Fits a sandbox to an image: where its mounts land, and the few files in `/etc` that every sandbox has.

An image is somebody else's: its links are followed here as they would be inside, never by the host.
"""

import dataclasses
from pathlib import Path, PurePosixPath

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.command import COVERED, HOME, mount_points
from prorl_envs.sandbox.system import write_names

_ACCOUNTS_LIMIT = 1 << 20
_LINK_LIMIT = 40


def resolve(root: Path, target: str) -> str:
    """The absolute path without links that `target` means inside `root`, whose parts need not exist.

    Raises:
        SandboxError: its links go round in circles.
    """
    pending = list(reversed(PurePosixPath(target).parts[1:]))
    done: list[str] = []
    links = 0
    while pending:
        part = pending.pop()
        if part == "..":
            done = done[:-1]
            continue
        path = root.joinpath(*done, part)
        if not path.is_symlink():
            done.append(part)
            continue
        links += 1
        if links > _LINK_LIMIT:
            raise SandboxError(f"the image's {target} is a link in circles")
        aim = path.readlink()
        if aim.is_absolute():
            done = []
        pending += reversed([part for part in aim.parts if part != "/"])
    return "/" + "/".join(done)


def resolve_targets(root: Path, spec: SandboxSpec) -> SandboxSpec:
    """`spec` with every path inside resolved in the image at `root`.

    Raises:
        SandboxError: a directory that every sandbox has is a link or a file in the image.
    """
    for path in COVERED:
        if resolve(root, path) != path or not _is_directory_if_any(root / path[1:]):
            raise SandboxError(f"the image's {path} is not a directory", hint="make it one and build again")
    return dataclasses.replace(
        spec,
        workdir=resolve(root, spec.workdir),
        mounts=tuple(dataclasses.replace(mount, target=resolve(root, mount.target)) for mount in spec.mounts),
        masks=tuple(resolve(root, mask) for mask in spec.masks),
    )


def write_upper(root: Path, upper: Path, spec: SandboxSpec) -> None:
    """Lay into `upper`, before it is mounted over the image at `root`, what differs from the start.

    The mount points are this user's own there: below another user's directory bubblewrap could make none.

    Args:
        spec: with its paths resolved.
    """
    upper.chmod(0o755)
    for target, is_directory in mount_points(spec).items():
        _make_directories(upper, target if is_directory else str(PurePosixPath(target).parent))
    if resolve(root, "/etc") == "/etc" and _is_directory_if_any(root / "etc"):
        _make_directories(upper, "/etc")
        write_names(upper / "etc", spec.hostname)
        _add_account(root, upper, "passwd", spec.uid, f"agent:x:{spec.uid}:{spec.uid}:agent:{HOME}:/bin/sh")
        _add_account(root, upper, "group", spec.uid, f"agent:x:{spec.uid}:")


def _make_directories(upper: Path, directory: str) -> None:
    path = upper
    for part in PurePosixPath(directory).parts[1:]:
        path /= part
        path.mkdir(mode=0o755, exist_ok=True)


def _add_account(root: Path, upper: Path, name: str, number: int, line: str) -> None:
    """Enter the sandbox's user unless the image has one of that number."""
    source = root / resolve(root, f"/etc/{name}")[1:]
    found = source.is_file()
    if found and source.stat().st_size > _ACCOUNTS_LIMIT:
        return
    text = source.read_text(errors="surrogateescape") if found else ""
    if all(entry.split(":")[2:3] != [str(number)] for entry in text.splitlines()):
        separator = "\n" if text and not text.endswith("\n") else ""
        (upper / "etc" / name).write_text(f"{text}{separator}{line}\n", errors="surrogateescape")


def _is_directory_if_any(path: Path) -> bool:
    return path.is_dir() or not path.exists()
