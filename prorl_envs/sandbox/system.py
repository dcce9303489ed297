"""The system a sandbox sees: the host's `/usr` read-only, and an `/etc` of our own.

The host's `/etc` never appears: run by root, a sandbox would read `/etc/shadow` through it.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from prorl_envs.sandbox.base import DEFAULT_HOSTNAME

#: Top-level directories that are links into /usr on most systems, and real on some.
_ROOT_DIRECTORIES = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")

#: What programs need from the host's /etc, where it exists. No secrets, and no links out of it but to /usr.
_COPIED = (
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "os-release",
    "pki/tls/certs",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
)

#: What /proc tells of the whole kernel and not of a process: keys and timers of all users, memory, addresses.
#: Some can be read by all, most by the host's root alone, who may be this sandbox's user. Others need a
#: capability besides (kcore, kmsg), or are harmless where /proc is read-only (sysrq-trigger).
_KERNEL_FILES = (
    "key-users",
    "keys",
    "kpagecgroup",
    "kpagecount",
    "kpageflags",
    "latency_stats",
    "pagetypeinfo",
    "sched_debug",
    "slabinfo",
    "timer_list",
    "timer_stats",
    "vmallocinfo",
)


def kernel_masks(proc: Path = Path("/proc")) -> Iterator[str]:
    """bubblewrap options that hide, in a new /proc, what it would tell of the kernel.

    Only what this user can read: each is a mount more.

    Args:
        proc: the host's, which has the same files.
    """
    for name in kernel_files(proc):
        # A device on a mount without devices: it cannot even be opened.
        yield from ("--ro-bind", "/dev/null", f"/proc/{name}")


def kernel_files(proc: Path = Path("/proc")) -> Iterator[str]:
    """The names of what this user could read of the kernel in `proc`."""
    return (name for name in _KERNEL_FILES if os.access(proc / name, os.R_OK))


def system_arguments(host: Path = Path("/")) -> Iterator[str]:
    """bubblewrap options that make the host's programs and libraries visible, read-only."""
    yield from ("--ro-bind", str(host / "usr"), "/usr")
    for path in root_directories(host):
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), f"/{path.name}")
        else:
            yield from ("--ro-bind", str(path), f"/{path.name}")


def root_directories(host: Path = Path("/")) -> Iterator[Path]:
    """The directories, or links to directories, beside `/usr` in which programs and libraries lie."""
    for name in _ROOT_DIRECTORIES:
        if (host / name).is_symlink() or (host / name).is_dir():
            yield host / name


def write_etc(target: Path, *, uid: int, home: str, host: Path = Path("/etc")) -> None:
    """Write an `/etc` directory into `target`, a new directory.

    Args:
        target: made here.
        uid: the user inside, entered in passwd and group beside root and nobody.
        home: that user's home directory inside.
        host: where the harmless files are copied from.
    """
    target.mkdir(parents=True)
    for name in _COPIED:
        _copy(host / name, target / name)
    user = "" if uid == 0 else f"agent:x:{uid}:{uid}:agent:{home}:/bin/bash\n"
    group = "" if uid == 0 else f"agent:x:{uid}:\n"
    root_home = home if uid == 0 else "/root"
    (target / "passwd").write_text(
        f"root:x:0:0:root:{root_home}:/bin/bash\n{user}nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    )
    (target / "group").write_text(f"root:x:0:\n{group}nogroup:x:65534:\n")
    (target / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    write_names(target, DEFAULT_HOSTNAME)  # sandboxes of other names have their own bound over these
    (target / "resolv.conf").touch()


def write_names(directory: Path, hostname: str) -> None:
    """Write the `hostname` and `hosts` files of one sandbox into `directory`."""
    (directory / "hostname").write_text(f"{hostname}\n")
    (directory / "hosts").write_text(f"127.0.0.1 localhost {hostname}\n::1 localhost\n")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target, symlinks=True)
    elif source.is_file():  # follows a link such as localtime
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
