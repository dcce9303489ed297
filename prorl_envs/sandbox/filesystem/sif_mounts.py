"""SIF images mounted through FUSE, in the directory of the driver that uses them.

The driver holds a shared lock on a file, which the kernel releases even if the driver is killed. A keeper
process waits for the exclusive lock, and so unmounts (which stops squashfuse) however the driver stopped.
Everything here blocks.
"""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.filesystem.sif import system_partition
from prorl_envs.sandbox.linux.proc_lines import proc_lines

_TIMEOUT_S = 60.0
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
#: its own shared lock until the keeper runs, in case the service is killed. The keeper does nothing if the
#: driver has unmounted the image and removed the locked file.
_MOUNT_AND_KEEP = """
place=$1 offset=$2 image=$3
exec 9<"$place/users"
flock -s 9 || exit
"$squashfuse" -o "ro,nosuid,nodev,offset=$offset" "$image" "$place/root" 9<&- || exit
exec 9<"$place/users"  # releases this shared lock; a living driver has its own
{
    flock -x 9 && [ "$place/users" -ef /proc/self/fd/9 ] && exec "$fusermount" -u -z "$place/root"
} 2>/dev/null &
"""


class MountedImage:
    """Mounted SIF, until `release`; made by `mount`. Its root file system is its only layer.

    Args:
        place: directory of the mount point and the lock.
        user: descriptor with a shared lock; owned.
    """

    def __init__(self, place: Path, user: int) -> None:
        self.layers = (place / "root",)
        self._place = place
        self._user = user

    def release(self) -> None:
        """Unmount the image. Idempotent.

        Raises:
            SandboxError: the image cannot be unmounted.
        """
        if self._user < 0:
            return
        user, self._user = self._user, -1
        try:
            unmount_below(self._place)
            self.layers[0].rmdir()
            (self._place / "users").unlink()
            self._place.rmdir()
        finally:
            os.close(user)


def mount(image: Path, directory: Path) -> MountedImage:
    """Mount the SIF `image`, in processes that survive this one.

    Args:
        directory: existing directory of the driver.

    Raises:
        SandboxError: it is no SIF, or this machine cannot mount it; the hint names the missing part.
    """
    partition = system_partition(image)
    find_program("flock")
    programs = {
        "squashfuse": find_program("squashfuse_ll", "squashfuse"),
        "fusermount": find_program("fusermount3", "fusermount"),
    }
    try:
        place = Path(tempfile.mkdtemp(prefix="image-", dir=directory))
        (place / "root").mkdir(mode=0o700)
        user = os.open(place / "users", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise SandboxError(f"cannot mount {image}: {error}") from error
    mounted = MountedImage(place, user)
    try:
        fcntl.flock(user, fcntl.LOCK_SH)
        arguments = [str(place), str(partition.offset), str(image.resolve())]
        _run([find_program("sh"), "-c", _MOUNT_AND_KEEP, "mount", *arguments], env=programs)
    except BaseException:
        mounted.release()
        raise
    return mounted


def unmount_below(directory: Path) -> None:
    """Unmount all images that are mounted below a directory. Their keepers may do so at the same time.

    Raises:
        SandboxError: an image cannot be unmounted.
    """
    # Only by the kernel's list: access to a mount point could block on a dead squashfuse.
    for place in mount_places():
        if not Path(place).is_relative_to(directory):
            continue
        try:
            _run([find_program("fusermount3", "fusermount"), "-u", "-z", place])
        except SandboxError:
            if place in mount_places():
                raise


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


def mount_places() -> list[str]:
    """Return all mount points, from the kernel's list."""
    lines = map(os.fsencode, proc_lines(Path("/proc/self/mountinfo")))
    return [os.fsdecode(_OCTAL.sub(_from_octal, line.split(b" ")[4])) for line in lines]


def _from_octal(match: re.Match[bytes]) -> bytes:
    return bytes([int(match[1], 8)])
