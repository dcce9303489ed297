"""SIF images mounted through FUSE: once per node and user, for any number of services and sandboxes.

A shared lock on a file is the reference count: the kernel drops it even for a service that is killed. A
keeper process waits for the exclusive lock, and so unmounts (which ends squashfuse) when the last user has
gone, however it went. Everything here blocks.
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
from prorl_envs.sandbox.sif import Partition, system_partition

logger = logging.getLogger(__name__)

_PREFIX = "prorl-images-"
_TIMEOUT_S = 60.0
_ATTEMPTS = 100
_OCTAL = re.compile(rb"\\([0-7]{3})")
#: Where to find programs; Apptainer brings its own squashfuse.
_PROGRAMS = (
    "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
    ":/usr/local/libexec/apptainer/bin:/usr/libexec/apptainer/bin"
)
_REMEDY = (
    "install squashfuse and fuse3 and make /dev/fuse accessible to this user; or unpack the image with "
    "`apptainer build --sandbox DIRECTORY IMAGE` and give the directory"
)

#: Mounts, and leaves a keeper behind that unmounts once nobody holds the lock; a share of its own bridges the
#: time until then, should the service be killed meanwhile. That the file is still the one it locked is
#: checked for the keeper that wakes late: by then another service may have mounted anew.
_MOUNT_AND_KEEP = """
place=$1 offset=$2 image=$3
exec 9<"$place/users"
flock -s 9 || exit
"$squashfuse" -o "ro,nosuid,nodev,offset=$offset" "$image" "$place/root" 9<&- || exit
exec 9<"$place/users"  # the share ends; where the service lives, its own goes on
{
    flock -x 9 && [ "$place/users" -ef /proc/self/fd/9 ] && exec "$fusermount" -u -z "$place/root"
} 2>/dev/null &
"""


class MountedImage:
    """A share in one image's mount; made by `mount`.

    Args:
        place: holds the mount point and the lock.
        users: descriptor with a shared lock; owned.
    """

    def __init__(self, place: Path, users: int) -> None:
        self._place = place
        self._users = users

    @property
    def root(self) -> Path:
        """Where the image's root file system is seen on the host."""
        return self._place / "root"

    def release(self) -> None:
        """Give up the share; the last one unmounts. Idempotent.

        Raises:
            SandboxError: it cannot be unmounted.
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
        image: the file. Where its content changes it counts as another image.
        base: existing directory on a local disk, below which all services of this user share mounts.

    Raises:
        SandboxError: it is no SIF, or this machine cannot mount it; the hint says what is missing.
    """
    partition = system_partition(image)
    for _ in range(_ATTEMPTS):
        try:
            place = _own_directory(base) / identity(image)
            place.mkdir(mode=0o700, exist_ok=True)
            lock = _lock_directory(place)
        except (FileNotFoundError, FileExistsError):  # `mkdir` looks twice
            continue  # its last user was just leaving
        try:
            return _share(image, partition, place)
        finally:
            os.close(lock)
    raise SandboxError(f"cannot mount {image}: its directory keeps being removed")


def sweep_mounts(base: Path) -> list[Path]:
    """Unmount and remove what killed services of this user left below `base`. Returns what was removed.

    What cannot be removed is logged and left: it is none of the caller's.
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
            logger.warning("cannot remove what a killed service left: %s", error)
    return removed


def _sweep(place: Path) -> bool:
    with _exclusive(place):
        users = _open_users(place)
        try:
            return _remove_unused(place, users)
        finally:
            os.close(users)


def _share(image: Path, partition: Partition, place: Path) -> MountedImage:
    """Called with the place locked, so one at a time."""
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
    """Unmount and remove `place` unless somebody else has a share. Called with the place locked."""
    if not _has_no_other(users):
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


def _has_no_other(users: int) -> bool:
    """Take the exclusive lock unless another has a share."""
    for _ in range(3):
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # To change a lock gives it up for a moment, in which the keeper may have got it: wait for that.
            fcntl.flock(users, fcntl.LOCK_SH)
        else:
            return True
    return False


def _serves(root: Path) -> bool:
    """Whether the image is mounted and its squashfuse alive; a dead one's mount is removed."""
    if not _is_mounted(root):
        return False
    try:
        os.statvfs(root)  # not stat, whose answer the kernel keeps for a while
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise SandboxError(f"cannot use the image's mount: {error}") from error
        _run([find_program("fusermount3", "fusermount"), "-u", "-z", str(root)])
        return False
    return True


def _mount(image: Path, partition: Partition, place: Path) -> None:
    """In a process that goes on where this one is killed: what is mounted always has a keeper."""
    (place / "root").mkdir(mode=0o700, exist_ok=True)
    find_program("flock")
    programs = {
        "squashfuse": find_program("squashfuse_ll", "squashfuse"),
        "fusermount": find_program("fusermount3", "fusermount"),
    }
    arguments = [str(place), str(partition.offset), str(image.resolve())]
    _run([find_program("sh"), "-c", _MOUNT_AND_KEEP, "mount", *arguments], env=programs)


def find_program(*names: str) -> str:
    """The first of `names` that is installed.

    Raises:
        SandboxError: none is, with what to do as hint.
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
            start_new_session=True,  # not ended by what is sent to the service and its group
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"cannot mount an image: {error}", hint=_REMEDY) from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip() or f"{command[0]} failed without a word"
        raise SandboxError(f"cannot mount an image: {said}", hint=_REMEDY)


def _own_directory(base: Path) -> Path:
    path = base / f"{_PREFIX}{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not _is_own(path):
        raise SandboxError(f"{path} is not this user's own directory", hint="set PRORL_RUN_DIR to another")
    return path


def _is_own(path: Path) -> bool:
    """Whether it is a directory of this user's that nobody else can reach into."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def identity(image: Path) -> str:
    """Names the image by what the file is now."""
    found = image.stat()
    text = f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_mounted(path: Path) -> bool:
    """By the kernel's list: to ask the mount itself could wait for a dead squashfuse."""
    return str(path) in mount_places()


def mount_places() -> list[str]:
    """Where something is mounted, by the kernel's list."""
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    return [os.fsdecode(_OCTAL.sub(_from_octal, line.split()[4])) for line in lines]


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
    """A descriptor of the directory with an exclusive lock.

    Raises:
        FileNotFoundError: it is gone, or went while this waited.
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
