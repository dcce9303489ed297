"""SIF images mounted through FUSE: once per node and user, for any number of services and sandboxes.

A shared lock on a file is the reference count: the kernel drops it even if a service is killed. A keeper
process waits for the exclusive lock, and so unmounts (which stops squashfuse) after the last user, no matter
how that user stopped. Everything here blocks.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.filesystem.sif import Partition, system_partition
from prorl_envs.sandbox.linux.proc_lines import proc_lines

logger = logging.getLogger(__name__)

_PREFIX = "prorl-images-"
_TIMEOUT_S = 60.0
_ATTEMPTS = 100
_OCTAL = re.compile(rb"\\([0-7]{3})")
#: Search path for programs; Apptainer installs its own squashfuse.
_PROGRAMS = (
    "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
    ":/usr/local/libexec/apptainer/bin:/usr/libexec/apptainer/bin"
)
_REMEDY = (
    "install squashfuse and fuse3 and make /dev/fuse accessible to this user; or unpack the image with "
    "`apptainer build --sandbox DIRECTORY IMAGE` and give the directory"
)

#: Mounts an image and starts a keeper, which unmounts it once all shared locks are released. The script has
#: its own shared lock until the keeper runs, in case the service is killed. Another service may have mounted
#: the image anew when the keeper gets its lock, so the keeper checks that the locked file is still there.
_MOUNT_AND_KEEP = """
place=$1 offset=$2 image=$3
exec 9<"$place/users"
flock -s 9 || exit
"$squashfuse" -o "ro,nosuid,nodev,offset=$offset" "$image" "$place/root" 9<&- || exit
exec 9<"$place/users"  # releases this shared lock; a living service has its own
{
    flock -x 9 && [ "$place/users" -ef /proc/self/fd/9 ] && exec "$fusermount" -u -z "$place/root"
} 2>/dev/null &
"""


class MountedImage:
    """A share in one image's mount; made by `mount`.

    Args:
        place: directory of the mount point and the lock.
        users: descriptor with a shared lock; owned.
    """

    def __init__(self, place: Path, users: int) -> None:
        self._place = place
        self._users = users

    @property
    def root(self) -> Path:
        """Host path of the image's root file system."""
        return self._place / "root"

    @property
    def layers(self) -> tuple[Path, ...]:
        """See `images.AvailableImage`: the root file system is the only layer."""
        return (self.root,)

    def release(self) -> None:
        """Release the share; releasing the last share unmounts the image. Idempotent.

        Raises:
            SandboxError: the image cannot be unmounted.
        """
        if self._users < 0:
            return
        users, self._users = self._users, -1
        try:
            with _exclusive(self._place):
                _remove_unused(self._place, users)
        finally:
            os.close(users)


def mount(image: Path, base: Path) -> MountedImage:
    """Mount the SIF `image`, or take a share in its mount.

    Args:
        image: path of the SIF. If the file changes, it counts as another image.
        base: existing directory on a local disk, below which all services of this user share mounts.

    Raises:
        SandboxError: it is no SIF, or this machine cannot mount it; the hint names the missing part.
    """
    partition = system_partition(image)
    for _ in range(_ATTEMPTS):
        try:
            place = _own_directory(base) / identity(image)
            place.mkdir(mode=0o700, exist_ok=True)
            lock = _lock_directory(place)
        except (FileNotFoundError, FileExistsError):  # `mkdir` checks an existing path again
            continue  # the last user of the mount was removing the directory
        try:
            return _share(image, partition, place)
        finally:
            os.close(lock)
    raise SandboxError(f"cannot mount {image}: its directory keeps being removed")


def sweep_mounts(base: Path) -> list[Path]:
    """Unmount and remove the leftovers of this user's killed services below `base`. Return the removed paths.

    Failures are logged and skipped, since they do not concern the caller.
    """
    directory = base / f"{_PREFIX}{os.geteuid()}"
    try:
        if not _is_own(directory):
            return []
    except FileNotFoundError:
        return []
    removed = []
    for place in directory.glob("*"):
        try:
            if _sweep(place):
                removed.append(place)
        except FileNotFoundError:
            continue  # another sweeper was faster
        except (OSError, SandboxError) as error:
            logger.warning("cannot remove the leftovers of a killed service: %s", error)
    return removed


def _sweep(place: Path) -> bool:
    with _exclusive(place):
        users = _open_users(place)
        try:
            return _remove_unused(place, users)
        finally:
            os.close(users)


def _share(image: Path, partition: Partition, place: Path) -> MountedImage:
    """Take a share, and mount the image if necessary. The caller holds the lock of `place`."""
    users = _open_users(place)
    share = MountedImage(place, users)
    try:
        fcntl.flock(users, fcntl.LOCK_SH)  # waits at most for a keeper that is about to unmount
        if not _serves(share.root):
            _mount(image, partition, place)
    except BaseException:
        _remove_unused(place, users)
        os.close(users)
        raise
    return share


def _remove_unused(place: Path, users: int) -> bool:
    """Unmount and remove `place` unless another share exists. The caller holds the lock of `place`."""
    if not _is_last_share(users):
        return False
    root = place / "root"
    if _is_mounted(root):
        _run([find_program("fusermount3", "fusermount"), "-u", "-z", str(root)])
    with contextlib.suppress(FileNotFoundError):
        root.rmdir()
    (place / "users").unlink()
    place.rmdir()
    with contextlib.suppress(OSError):  # other images are mounted beside it
        place.parent.rmdir()
    return True


def _is_last_share(users: int) -> bool:
    """Take the exclusive lock unless another share exists. Return True on success."""
    for _ in range(3):
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Converting the lock releases it for a moment. The keeper may have got it meanwhile: wait for it.
            fcntl.flock(users, fcntl.LOCK_SH)
        else:
            return True
    return False


def _serves(root: Path) -> bool:
    """Return True if the image is mounted and its squashfuse runs; unmount it if that has died."""
    if not _is_mounted(root):
        return False
    try:
        os.statvfs(root)  # not stat, whose result the kernel caches
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise SandboxError(f"cannot use the image's mount: {error}") from error
        _run([find_program("fusermount3", "fusermount"), "-u", "-z", str(root)])
        return False
    return True


def _mount(image: Path, partition: Partition, place: Path) -> None:
    """Mount the image and start its keeper, in processes that survive this one."""
    (place / "root").mkdir(mode=0o700, exist_ok=True)
    find_program("flock")
    programs = {
        "squashfuse": find_program("squashfuse_ll", "squashfuse"),
        "fusermount": find_program("fusermount3", "fusermount"),
    }
    arguments = [str(place), str(partition.offset), str(image.resolve())]
    _run([find_program("sh"), "-c", _MOUNT_AND_KEEP, "mount", *arguments], env=programs)


def find_program(*names: str) -> str:
    """Return the first of `names` that is installed.

    Raises:
        SandboxError: none is installed, with a remedy as hint.
    """
    for name in names:
        if found := shutil.which(name, path=_PROGRAMS):
            return found
    raise SandboxError(f"cannot mount an image: {names[0]} is not installed", hint=_REMEDY)


def _run(command: list[str], *, env: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={"PATH": _PROGRAMS, **(env or {})},
            cwd="/",
            start_new_session=True,  # signals to the service's process group must not reach it
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"cannot mount an image: {error}", hint=_REMEDY) from error
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip() or f"{command[0]} failed without a message"
        raise SandboxError(f"cannot mount an image: {reason}", hint=_REMEDY)


def _own_directory(base: Path) -> Path:
    path = base / f"{_PREFIX}{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not _is_own(path):
        raise SandboxError(f"{path} is not this user's own directory", hint="set PRORL_RUN_DIR to another")
    return path


def _is_own(path: Path) -> bool:
    """Return True if `path` is a directory of this user's without access for others."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def identity(image: Path) -> str:
    """Return a key for the image, from the file's current metadata."""
    found = image.stat()
    text = f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_mounted(path: Path) -> bool:
    """Return whether a path is a mount point. Access to the path itself could block on a dead squashfuse."""
    return str(path) in mount_places()


def mount_places() -> list[str]:
    """Return all mount points, from the kernel's list."""
    lines = map(os.fsencode, proc_lines(Path("/proc/self/mountinfo")))
    return [os.fsdecode(_OCTAL.sub(_from_octal, line.split(b" ")[4])) for line in lines]


def _from_octal(match: re.Match[bytes]) -> bytes:
    return bytes([int(match[1], 8)])


@contextmanager
def _exclusive(place: Path) -> Iterator[None]:
    lock = _lock_directory(place)
    try:
        yield
    finally:
        os.close(lock)


def _lock_directory(place: Path) -> int:
    """Return a descriptor of the directory with an exclusive lock.

    Raises:
        FileNotFoundError: the directory does not exist, or was removed during the wait.
    """
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if not os.path.samestat(os.fstat(fd), place.stat()):
            raise FileNotFoundError(errno.ENOENT, "replaced by another", str(place))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_users(place: Path) -> int:
    return os.open(place / "users", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
