"""Adaptation of a sandbox to an image: targets of mounts, and the few files that every sandbox has.

An image is untrusted: its links are resolved here as inside the sandbox, never by the host.
"""

import dataclasses
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.filesystem.host_system import write_names
from prorl_envs.sandbox.filesystem.layered import LayerTree
from prorl_envs.sandbox.filesystem.mount_plan import HOME, ROOT_HOME, covered, mount_points

_ACCOUNTS_LIMIT = 1 << 20
#: Files in the host directory of a sandbox with an emulated root, and their paths inside.
_NAMES = {"hosts": "/etc/hosts", "hostname": "/etc/hostname"}
#: apt gives up its privileges before a download and then checks that it has lost them.
_APT_DIRECTORY = "/etc/apt/apt.conf.d"
_APT_SETTING = ("90prorl-emulated-root", 'APT::Sandbox::User "root";\n')


def resolve_targets(tree: LayerTree, spec: SandboxSpec) -> SandboxSpec:
    """Return `spec` with every path inside resolved in the image.

    Raises:
        SandboxError: a directory that every sandbox has is a link or a file in the image.
    """
    for path in covered(spec):
        if not _is_directory_if_any(tree, path):
            raise SandboxError(f"the image's {path} is not a directory", hint="make it one and build again")
    return dataclasses.replace(
        spec,
        workdir=tree.resolve(spec.workdir),
        mounts=tuple(dataclasses.replace(mount, target=tree.resolve(mount.target)) for mount in spec.mounts),
        masks=tuple(tree.resolve(mask) for mask in spec.masks),
    )


def write_upper(tree: LayerTree, upper: Path, spec: SandboxSpec) -> None:
    """Write the initial changes to the image into `upper`, before `upper` is mounted over it.

    They include the mount points: bubblewrap cannot create them in another user's directory of the image.

    Args:
        spec: the sandbox's spec, with its paths resolved.
    """
    upper.chmod(0o755)
    for target, is_directory in mount_points(spec).items():
        _make_directories(upper, target if is_directory else str(PurePosixPath(target).parent))
    if _is_directory_if_any(tree, "/etc"):
        _make_directories(upper, "/etc")
        write_names(upper / "etc", spec.hostname, spec.hosts)
        _add_account(tree, upper, "passwd", spec.uid, f"agent:x:{spec.uid}:{spec.uid}:agent:{HOME}:/bin/sh")
        _add_account(tree, upper, "group", spec.uid, f"agent:x:{spec.uid}:")


def write_root_upper(tree: LayerTree, upper: Path, spec: SandboxSpec) -> None:
    """Write the additions for an emulated root, who owns the image: missing directories, a setting of apt.

    Args:
        spec: the sandbox's spec, with its paths resolved.
    """
    upper.chmod(_mode(tree, "/", 0o755))
    for path, mode in ((spec.workdir, 0o755), ("/tmp", 0o1777), (ROOT_HOME, 0o700)):
        if not (found := tree.locate(path)).kind:
            _add_directory(tree, upper, found.path, mode)
    directory = tree.locate(_APT_DIRECTORY)
    name, text = _APT_SETTING
    if directory.kind == stat.S_IFDIR and not tree.kind(f"{directory.path}/{name}"):
        _add_directory(tree, upper, directory.path, 0o755)
        (upper / directory.path[1:] / name).write_text(text)


def add_names(tree: LayerTree, spec: SandboxSpec, directory: Path) -> SandboxSpec:
    """Return `spec` with the sandbox's own names mounted from `directory`, if the image has an `/etc`.

    Used for an emulated root, whose changes to `/etc` may become a layer: that must not contain the names.
    """
    if tree.kind("/etc") != stat.S_IFDIR:
        return spec
    given = {mount.target for mount in spec.mounts}
    names = (
        Mount(source=directory / name, target=target, writable=True)
        for name, target in _NAMES.items()
        if target not in given
    )
    return dataclasses.replace(spec, mounts=(*spec.mounts, *names))


def check_owners(layers: Sequence[Path], user: int, group: int) -> None:
    """Check that an emulated root owns the image: the kernel refuses writes to directories of unknown owners.

    Raises:
        SandboxError: another user or group owns the root directory of a layer.
    """
    for layer in layers:
        status = layer.stat()
        if (status.st_uid, status.st_gid) != (user, group):
            raise SandboxError(
                f"the image {layer} belongs to user {status.st_uid}, group {status.st_gid}; "
                f"an emulated root can write only files of user {user}, group {group}",
                hint="copy it with `cp -r --preserve=mode,links`, or build it with `prorl-envs image build`",
            )


def _is_directory_if_any(tree: LayerTree, path: str) -> bool:
    """Return True if an absolute path without links is a directory of the image, or does not exist in it."""
    found = tree.locate(path)
    return found.path == path and found.kind in (0, stat.S_IFDIR)


def _make_directories(upper: Path, directory: str) -> None:
    path = upper
    for part in PurePosixPath(directory).parts[1:]:
        path /= part
        path.mkdir(mode=0o755, exist_ok=True)


def _add_directory(tree: LayerTree, upper: Path, directory: str, mode: int) -> None:
    """Create a directory in `upper`, with its parents. Directories of the image keep their modes."""
    parts = PurePosixPath(directory).parts[1:]
    for count in range(1, len(parts) + 1):
        inside = "/" + "/".join(parts[:count])
        path = upper / inside[1:]
        if not path.exists():
            path.mkdir()
            path.chmod(_mode(tree, inside, mode if count == len(parts) else 0o755))


def _mode(tree: LayerTree, directory: str, default: int) -> int:
    status = tree.locate(directory).status
    return default if status is None else stat.S_IMODE(status.st_mode) | 0o700


def _add_account(tree: LayerTree, upper: Path, name: str, number: int, line: str) -> None:
    """Add the sandbox's user to passwd or group, unless the image has an entry with that number."""
    path = f"/etc/{name}"
    kind = tree.kind(path)
    if kind not in (0, stat.S_IFREG):
        return
    text = tree.read(path, _ACCOUNTS_LIMIT) if kind else ""
    if text is not None and all(entry.split(":")[2:3] != [str(number)] for entry in text.splitlines()):
        separator = "\n" if text and not text.endswith("\n") else ""
        (upper / "etc" / name).write_text(f"{text}{separator}{line}\n", errors="surrogateescape")
