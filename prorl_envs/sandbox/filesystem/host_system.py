"""System files of a sandbox: the host's `/usr` read-only, and a generated `/etc`.

The host's `/etc` is never mounted: a sandbox run by root could read `/etc/shadow` through it.
"""

import functools
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from prorl_envs.sandbox.base import DEFAULT_HOSTNAME

#: Top-level directories that are links into /usr on most systems, and real on some.
_ROOT_DIRECTORIES = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")

#: Files of the host's /etc, if they exist, that programs need. No secrets; links only into /usr.
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

#: Links to manual pages, which are most links in `alternatives` (321 of 391 on a Debian). No program needs
#: them, and on a slow file system it takes 0.5 ms to create one and 0.5 ms to remove it.
_MANUALS = shutil.ignore_patterns("*.gz")

#: Files in /proc about the kernel rather than a process: keys and timers of all users, memory, addresses.
#: Some are readable for all, most only for the host's root, who may be this sandbox's user. Others need a
#: capability as well (kcore, kmsg), or are harmless in a read-only /proc (sysrq-trigger).
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


@functools.cache  # needs the disk, and is the same for all sandboxes of this process
def kernel_masks(proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Return bubblewrap options that hide files about the kernel in a new /proc.

    Files that this user cannot read are skipped, because each option takes a mount.

    Args:
        proc: the host's /proc, which has the same files.
    """
    # Opening the file fails, because bubblewrap mounts /dev/null without permission to use devices.
    return tuple(part for name in kernel_files(proc) for part in ("--ro-bind", "/dev/null", f"/proc/{name}"))


def kernel_files(proc: Path = Path("/proc")) -> Iterator[str]:
    """Yield the names of the files about the kernel in `proc` that this user can read."""
    return (name for name in _KERNEL_FILES if os.access(proc / name, os.R_OK))


@functools.cache
def system_arguments(host: Path = Path("/")) -> tuple[str, ...]:
    """Return bubblewrap options that make the host's programs and libraries visible, read-only."""
    found = ["--ro-bind", str(host / "usr"), "/usr"]
    for path in root_directories(host):
        if path.is_symlink():
            found += ("--symlink", str(path.readlink()), f"/{path.name}")
        else:
            found += ("--ro-bind", str(path), f"/{path.name}")
    return tuple(found)


def root_directories(host: Path = Path("/")) -> Iterator[Path]:
    """Yield the directories of programs and libraries beside `/usr`, or links to directories."""
    for name in _ROOT_DIRECTORIES:
        if (host / name).is_symlink() or (host / name).is_dir():
            yield host / name


def write_etc(target: Path, *, uid: int, home: str, host: Path = Path("/etc")) -> None:
    """Write an `/etc` directory.

    Args:
        target: path of the directory, which is created.
        uid: user id inside; passwd and group list it beside root and nobody.
        home: that user's home directory inside.
        host: directory from which the harmless files are copied.
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
    write_names(target, DEFAULT_HOSTNAME)  # other names are mounted over these, per sandbox
    (target / "resolv.conf").touch()


def write_names(directory: Path, hostname: str, hosts: Mapping[str, str] | None = None) -> None:
    """Write the `hostname` and `hosts` files of one sandbox into `directory`; see `SandboxSpec.hosts`."""
    (directory / "hostname").write_text(f"{hostname}\n")
    others = "".join(f"{address} {name}\n" for name, address in (hosts or {}).items())
    (directory / "hosts").write_text(f"127.0.0.1 localhost {hostname}\n::1 localhost\n{others}")


def _copy(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target, symlinks=True, ignore=_MANUALS)
    elif source.is_file():  # follows a link such as localtime
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
