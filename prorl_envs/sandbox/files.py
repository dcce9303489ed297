"""Node-local directories: where a driver keeps its sandboxes' files, and how a hostile tree is removed.

A driver's directory is locked for as long as the driver lives, so the next driver can tell what a killed
service left behind and remove it.
"""

import fcntl
import itertools
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.cgroups import sweep_groups

logger = logging.getLogger(__name__)

_PREFIX = "prorl-sandboxes-"
_ARMED = "locked"
#: A Unix socket's path ends at 107 bytes; what tools put below a sandbox's directory needs the rest.
PATH_LIMIT = 64


def node_local_base() -> Path:
    """The directory under which a driver makes its own: `$PRORL_RUN_DIR`, else the temporary directory.

    Not `$XDG_RUNTIME_DIR`: it is a small tmpfs, and workspaces hold whole source trees.
    """
    return Path(os.environ.get("PRORL_RUN_DIR") or tempfile.gettempdir()).resolve()


class DriverDirectory:
    """A private locked directory, made on construction.

    Args:
        base: existing directory to make it in, on a local disk.

    Raises:
        SandboxError: it cannot be made there, or its path is too long for sockets below it.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        prefix = f"{_PREFIX}{os.geteuid()}-"
        if len(os.fsencode(base)) > PATH_LIMIT:
            raise SandboxError(
                f"the path of {base} is longer than {PATH_LIMIT} bytes",
                hint="set PRORL_RUN_DIR to a shorter one",
            )
        try:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            (self.path / _ARMED).touch()
        except OSError as error:
            raise SandboxError(
                f"cannot make a directory for sandboxes: {error}",
                hint="set PRORL_RUN_DIR to a writable directory on a local disk",
            ) from error

    @property
    def id(self) -> str:
        """Its own part of its name, unique on this node."""
        return self.path.name.rpartition("-")[2]

    def remove(self) -> None:
        """Remove it with everything in it and give up the lock. Idempotent."""
        if self._lock >= 0:
            remove_tree(self.path)
            os.close(self._lock)
            self._lock = -1


def driver_directory(base: Path, sandbox_id: str) -> Path:
    """The directory of the driver that made a sandbox, on this node and for this user. It may be gone."""
    return base / f"{_PREFIX}{os.geteuid()}-{sandbox_id.rpartition('-')[0]}"


def sweep(base: Path) -> list[Path]:
    """Remove the directories that killed drivers of this user left in `base`. Returns what was removed.

    What cannot be removed is logged and left: it is none of the caller's.
    """
    removed = []
    for path in base.glob(f"{_PREFIX}{os.geteuid()}-*"):
        if _is_abandoned(path):
            sweep_groups(path)  # first: the directory says where they are
            try:
                remove_tree(path)
            except OSError as error:
                logger.warning("cannot remove what a killed service left: %s", error)
            else:
                removed.append(path)
    return removed


def _is_abandoned(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False  # another sweeper was faster, or it is not ours to look at
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Without the mark, a driver is between making it and locking it.
        return (path / _ARMED).exists()
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a tree that a sandbox wrote, once nothing runs in it any more. Missing is fine.

    No link is followed. Directories are moved up to the top before they are emptied, so that neither depth
    nor path length matters (an agent can nest deeper than a path can name), and unreadable ones are made
    readable (overlayfs leaves one of mode 000).

    Raises:
        OSError: something cannot be removed.
    """
    try:
        make_accessible(path)
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        clear(top)
    finally:
        os.close(top)
    path.rmdir()


def clear(top: int, *, but: Collection[str] = ()) -> list[str]:
    """Remove what is in a directory (a descriptor) as `remove_tree` does.

    Args:
        but: names of directories in it that stay, and what is in them.

    Returns:
        those of them that there are.
    """
    fresh_names = map(f"{secrets.token_hex(8)}-{{}}".format, itertools.count())
    directories = _directories_left(top)
    pending = [name for name in directories if name not in but]
    while pending:
        name = pending.pop()
        make_accessible(name, top)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
        try:
            for child in _directories_left(fd):
                make_accessible(child, fd)  # a directory can only be moved by who may write to it
                moved = next(fresh_names)
                os.rename(child, moved, src_dir_fd=fd, dst_dir_fd=top)
                pending.append(moved)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=top)
    return [name for name in directories if name in but]


def _directories_left(fd: int) -> list[str]:
    """Unlink everything in the directory but its directories, and return their names."""
    while True:
        directories, unlinked = [], False
        # One entry at a time: a sandbox can make more files than their names would have room in memory.
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.name)
                else:
                    os.unlink(entry.name, dir_fd=fd)
                    unlinked = True
        if not unlinked:  # else look again: what was unlinked may have made the kernel skip something
            return directories


def make_accessible(path: Path | str, dir_fd: int | None = None) -> None:
    """Let this user into a directory of its own, whatever a sandbox did to its mode."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) & 0o700 != 0o700:
            Path(f"/proc/self/fd/{fd}").chmod(0o700)
    finally:
        os.close(fd)
