"""Kernel resources that sandboxes share, and their protection: limits per namespace, per mount and per
process, and devices that are mounted read-only.

Imported by templates: independent of the host side.
"""

import contextlib
import fcntl
import functools
import os
import resource
import stat
from collections.abc import Sequence

from prorl_envs.sandbox.linux.descriptors import opened, pid_of
from prorl_envs.sandbox.linux.syscall_wrappers import mount

#: Path below /proc/sys, and value of a setting.
type Setting = tuple[str, str]

#: One sandbox gets at most this fraction (1/8) of the resources that the kernel counts per user.
_PART = 8
#: Pseudo-terminals of one sandbox. All sandboxes share the total, `kernel.pty.max`.
_TERMINALS = 64
#: Limits per process of resources that the kernel counts per user: kind, soft and hard limit. The first is an
#: eighth of Linux's default and holds one queue of the default size. POSIX timers count as pending signals.
PROCESS_LIMITS = (
    (resource.RLIMIT_MSGQUEUE, 102400, 102400),
    (resource.RLIMIT_SIGPENDING, 4096, 4096),
)

#: The kernel memory that these settings limit counts as no process's memory. The defaults allow 64 GB of
#: semaphores and 512 MB of messages; these are the values of Linux before 3.19, which suffice in practice.
_IPC_SETTINGS: tuple[Setting, ...] = (
    ("kernel/sem", "250 32000 100 128"),
    ("kernel/msgmni", "16"),
)
#: Settings of the network namespace of an emulated root, who expects to listen on any port.
ROOT_SETTINGS: tuple[Setting, ...] = (("net/ipv4/ip_unprivileged_port_start", "0"),)
#: Settings of the user namespace, lowered to a fraction of the host user's own.
_USER_SETTINGS = ("max_inotify_instances", "max_inotify_watches")

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_NS_GET_USERNS = 0xB701


def namespace_settings(shared_bytes: int) -> tuple[Setting, ...]:
    """Return the settings of a sandbox's user and ipc namespaces.

    Args:
        shared_bytes: System V shared memory of all segments together; it outlives the processes that use it.
    """
    pages = max(1, shared_bytes // resource.getpagesize())
    return (*_user_settings(), *_IPC_SETTINGS, ("kernel/shmall", str(pages)))


@functools.cache
def _user_settings() -> tuple[Setting, ...]:
    found = []
    for name in _USER_SETTINGS:
        try:
            with open(f"/proc/sys/user/{name}", "rb") as file:  # noqa: PTH123 - templates import no pathlib
                found.append((f"user/{name}", str(max(1, int(file.read()) // _PART))))
        except FileNotFoundError:  # a kernel without inotify
            continue
    return tuple(found)


def limit_terminals() -> None:
    """Limit the pseudo-terminals at /dev/pts. Needs CAP_SYS_ADMIN in the user namespace of their mount.

    Raises:
        OSError: the kernel refused.
    """
    flags = _MS_REMOUNT | _MS_NOSUID | _MS_NOEXEC
    mount("", "/dev/pts", "devpts", flags, f"newinstance,ptmxmode=0666,mode=620,max={_TERMINALS}")


def make_read_only(place: str) -> None:
    """Make one mount read-only, without the mounts below it. Needs CAP_SYS_ADMIN.

    Raises:
        OSError: the kernel refused.
    """
    _remount(place, _MS_RDONLY)


def make_writable(place: str) -> None:
    """Undo `make_read_only`."""
    _remount(place, 0)


def _remount(place: str, flags: int) -> None:
    # Flags locked on the mount must be passed again. statvfs(2) and mount(2) use the same values for them.
    locked = os.statvfs(place).f_flag & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    mount("", place, "", _MS_REMOUNT | _MS_BIND | flags | locked)


def protect_devices() -> None:
    """Make the host's devices in /dev read-only: otherwise their owner could change their modes and times.

    Writing to a device does not change the file system, and still works. Needs CAP_SYS_ADMIN.

    Raises:
        OSError: the kernel refused.
    """
    for entry in os.scandir("/dev"):
        if stat.S_ISCHR(entry.stat(follow_symlinks=False).st_mode):
            make_read_only(entry.path)


def write_settings(settings: Sequence[Setting], proc: int) -> None:
    """Write settings of this process's namespaces.

    A kernel before 6.10 lets only root set those of an ipc namespace; the watchdog counts what
    cannot be limited there.

    Args:
        proc: descriptor of a /proc that is mounted writable.
    """
    for path, value in settings:
        with (
            contextlib.suppress(PermissionError, FileNotFoundError),
            opened(f"sys/{path}", os.O_WRONLY, dir_fd=proc) as fd,
        ):
            os.write(fd, value.encode())


def enter_and_limit(pidfd: int, settings: Sequence[Setting], *, host_network: bool) -> None:
    """Enter the user namespace that owns a sandbox's mounts, and limit the shared resources from there.

    For sandboxes whose launcher does not set these limits. The entered namespace is the parent of that of the
    sandbox's processes; the caller joins the sandbox afterwards.

    Args:
        pidfd: the sandbox's first process.
        host_network: whether the sandbox has the host's network, whose settings stay as they are.

    Raises:
        OSError: the sandbox has stopped, or the kernel refused.
    """
    network = 0 if host_network else os.CLONE_NEWNET
    with opened("/proc", os.O_PATH | os.O_DIRECTORY) as proc:
        enter_owner(pidfd)
        os.setns(pidfd, os.CLONE_NEWNS | os.CLONE_NEWIPC | network)
        write_settings(settings, proc)
        limit_terminals()
        protect_devices()


def enter_owner(pidfd: int) -> None:
    """Enter the user namespace that owns the mounts of a process. Raises OSError if it has exited."""
    with opened(f"/proc/{pid_of(pidfd)}/ns/mnt") as mounts:
        enter_owner_of(mounts)


def enter_owner_of(namespace: int) -> None:
    """Enter the user namespace that owns a namespace (a descriptor). Raises OSError if the kernel refuses."""
    owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
    try:
        os.setns(owner, os.CLONE_NEWUSER)
    finally:
        os.close(owner)
