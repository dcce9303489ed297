"""Node-local directories of drivers for sandbox files, and safe removal of untrusted trees.

A driver's directory is locked for the lifetime of the driver, so that the next driver can recognise and
remove the directories of killed services.
"""

import contextlib
import errno
import fcntl
import functools
import itertools
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

from prorl_envs.errors import SandboxError, UnsupportedMachine
from prorl_envs.sandbox.filesystem.sif_mounts import unmount_below
from prorl_envs.sandbox.linux.cgroups import sweep_groups
from prorl_envs.sandbox.linux.descriptors import opened

logger = logging.getLogger(__name__)

_PREFIX = "prorl-sandboxes-"
_ARMED = "locked"
#: Directories for sandboxes if the temporary directory is not suited, as in jobs of batch systems.
_SHORT_BASES = (Path("/tmp"), Path("/var/tmp"))
#: Seconds after which a directory without the file `_ARMED` counts as a killed driver's.
_UNMARKED_S = 60
#: Most bytes in the path of this directory. A Unix socket's path has at most 107 bytes, and the paths of
#: tools below a sandbox's directory need the rest.
PATH_LIMIT = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
BASE_REMEDY = (
    "set PRORL_RUN_DIR to a writable directory on a local disk with free space, with a short path and not "
    "mounted noexec"
)
#: Numbers of errors of a full disk, without bytes or inodes, of a reached quota, and of a read-only disk.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def node_local_base(chosen: Path | None = None) -> Path:
    """Return the directory under which a driver makes its own, and create it if it does not exist.

    The default is `$PRORL_RUN_DIR`, else the temporary directory. If sandboxes cannot be there, it is `/tmp`
    or `/var/tmp`, and a warning is logged. `$XDG_RUNTIME_DIR` is not used: it is a small tmpfs, and
    workspaces hold whole source trees. Never raises: users of the directory report failures.

    Args:
        chosen: the directory to use in place of the default.
    """
    if named := chosen or os.environ.get("PRORL_RUN_DIR"):
        base = Path(named).resolve()
        with contextlib.suppress(OSError):
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
        return base
    return _default_base(Path(tempfile.gettempdir()).resolve(), _SHORT_BASES)


def base_problem(base: Path) -> str:
    """Return why sandboxes cannot be below a directory; "" if they can."""
    return _unsuited(base) if os.access(base, os.W_OK | os.X_OK) else f"{base} is not writable"


def _unsuited(base: Path) -> str:
    if os.statvfs(base).f_flag & os.ST_NOEXEC:
        return f"{base} is mounted noexec: no program that a sandbox writes could run"
    if len(os.fsencode(base)) > PATH_LIMIT:
        return f"the path of {base} is longer than {PATH_LIMIT} bytes"
    return ""


@functools.cache  # called often, but must log once
def _default_base(wanted: Path, others: tuple[Path, ...]) -> Path:
    if not (problem := base_problem(wanted)):
        return wanted
    for base in others:
        if not base_problem(base):
            logger.warning(
                "%s: sandboxes are in %s instead (PRORL_RUN_DIR chooses a directory)", problem, base
            )
            return base
    return wanted


class DriverDirectory:
    """A private locked directory, created by the constructor.

    Args:
        base: existing directory on a local disk, in which it is created.

    Raises:
        UnsupportedMachine: it cannot be created, or `base` is not suited (see `base_problem`).
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        prefix = f"{_PREFIX}{os.geteuid()}-"
        try:
            if problem := _unsuited(base):
                raise UnsupportedMachine(problem, hint=BASE_REMEDY)
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            (self.path / _ARMED).touch()
        except OSError as error:
            raise UnsupportedMachine(
                f"cannot make a directory for sandboxes: {error}", hint=BASE_REMEDY
            ) from error

    @property
    def id(self) -> str:
        """The part of the directory's name that is unique on this node."""
        return self.path.name.rpartition("-")[2]

    def remove(self) -> None:
        """Remove the directory with its content and release the lock. Idempotent."""
        if self._lock >= 0:
            remove_tree(self.path)
            os.close(self._lock)
            self._lock = -1


def is_full(error: OSError) -> bool:
    """Return True if a file cannot be written because of its disk; also for `shutil.Error` (many files)."""
    return error.errno in _FULL or isinstance(error, shutil.Error)


def write_error(error: OSError) -> SandboxError:
    """Return the error for files of sandboxes that cannot be written. Of several files it names the first."""
    first = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
    return SandboxError(f"cannot make directories for sandboxes: {first}", hint=BASE_REMEDY)


def driver_directory(base: Path, sandbox_id: str) -> Path:
    """Return the directory of the driver that made a sandbox on this node for this user. It may not exist."""
    return base / f"{_PREFIX}{os.geteuid()}-{sandbox_id.rpartition('-')[0]}"


def sweep(base: Path) -> list[Path]:
    """Remove the directories that killed drivers of this user left in `base`. Return the removed paths.

    Failures are logged and skipped, since they do not concern the caller.
    """
    removed = []
    for path in base.glob(f"{_PREFIX}{os.geteuid()}-*"):
        if _is_abandoned(path):
            sweep_groups(path)  # before the directory, which lists the groups
            try:
                unmount_below(path)
                remove_tree(path)
            except (OSError, SandboxError) as error:
                logger.warning("cannot remove the leftovers of a killed service: %s", error)
            else:
                removed.append(path)
    return removed


def _is_abandoned(path: Path) -> bool:
    try:
        with opened(path, _DIRECTORY) as fd:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid():
                return False
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Without the file, a driver may be about to lock the directory, or was killed before that.
            return (path / _ARMED).exists() or time.time() - status.st_mtime > _UNMARKED_S
    except OSError:
        return False  # locked by a driver, removed by another sweeper, or not readable for this user


def remove_tree(path: Path) -> None:
    """Remove a tree that a stopped sandbox wrote. A missing tree is no error.

    No link is followed. Directories are moved up to the top before they are emptied, so that neither depth
    nor path length matters (an agent can nest directories deeper than a path can name). Unreadable
    directories are made readable (overlayfs leaves one of mode 000).

    Raises:
        OSError: something cannot be removed.
    """
    try:
        make_accessible(path)
        top = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        return
    try:
        _clear(top)
    finally:
        os.close(top)
    path.rmdir()


def _clear(top: int) -> None:
    """Remove the content of a directory (a descriptor)."""
    fresh_names = map(f"{secrets.token_hex(8)}-{{}}".format, itertools.count())
    pending = _unlink_files(top)
    while pending:
        name = pending.pop()
        make_accessible(name, top)
        with opened(name, _DIRECTORY, dir_fd=top) as fd:
            for child in _unlink_files(fd):
                make_accessible(child, fd)  # moving a directory needs write access to it
                moved = next(fresh_names)
                os.rename(child, moved, src_dir_fd=fd, dst_dir_fd=top)
                pending.append(moved)
        os.rmdir(name, dir_fd=top)


def _unlink_files(fd: int) -> list[str]:
    """Unlink all entries of a directory but its subdirectories, and return the names of these."""
    while True:
        directories, unlinked = [], False
        # One entry at a time: a sandbox can make more files than fit in memory as a list of names.
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.name)
                else:
                    os.unlink(entry.name, dir_fd=fd)
                    unlinked = True
        if not unlinked:  # else scan again: the kernel may skip entries after an unlink
            return directories


def make_accessible(path: Path | str, dir_fd: int | None = None) -> None:
    """Make one of this user's directories accessible again, if a sandbox changed its mode."""
    with opened(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd) as fd:
        if stat.S_IMODE(os.fstat(fd).st_mode) & 0o700 != 0o700:
            Path(f"/proc/self/fd/{fd}").chmod(0o700)
