"""From a `SandboxSpec` to bubblewrap's command line, of which the part about mounts is the plan of every
sandbox that is made of namespaces. Pure: no process, no file is touched."""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import DEFAULT_HOSTNAME, PROXY_PORT, Limits, Mount, SandboxSpec
from prorl_envs.sandbox.network_policy import Policy
from prorl_envs.sandbox.system import kernel_masks, system_arguments

HOME = "/home/agent"
DEFAULT_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "LANG": "C.UTF-8",
    "TERM": "xterm-256color",
}

#: The first process: says that the mounts are done, then waits for the end of its standard input, a socket
#: held by the host, and reaps orphans meanwhile. As pid 1 of its namespace no signal from inside ends it.
#: Shells differ, and dash surprises: there an ignored SIGCHLD is not ignored but makes `read` fail. So it is
#: trapped, a failed `read` counts as the end only where no child has died, and `jobs` does the reaping. dash
#: handles an interrupt of its own accord, and so could be ended by one: what can be ignored is.
INIT = (
    "/bin/sh",
    "-c",
    "trap '' HUP INT QUIT ALRM TERM USR1 USR2 TSTP TTIN TTOU; trap 'died=1' CHLD; "
    'echo ready; while died=; read _ || [ "$died" ]; do jobs; done',
)
#: What an image must be able to run.
TRIAL = ("/bin/sh", "-c", ":")
#: Directories of every sandbox that are mounted over an image's.
COVERED = ("/proc", "/dev", "/run", "/tmp", HOME)

_HOSTNAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}")
_SHM_BYTES = 256 << 20
_RUN_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SandboxFiles:
    """The host directories of one sandbox, below the driver's.

    Args:
        root: the sandbox's own.
        etc: shared by the sandboxes of a uid.
        image: the root file system of the spec's image.
    """

    root: Path
    etc: Path
    image: Path | None = None

    @property
    def upper(self) -> Path:
        """What the sandbox changes in its image."""
        return self.root / "upper"

    @property
    def overlay_work(self) -> Path:
        """The kernel's, beside `upper`."""
        return self.root / "overlay"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def home(self) -> Path:
        return self.root / "home"

    def overlay(self, index: int) -> tuple[Path, Path]:
        """The upper and the work directory of the mount at `index`."""
        return self.root / f"upper{index}", self.root / f"overlay{index}"

    def state(self, spec: SandboxSpec) -> Iterator[Path]:
        """The directories that hold what the sandbox wrote."""
        yield from (self.work, self.tmp, self.home)
        if self.image is not None:
            yield self.upper
        yield from (self.overlay(index)[0] for index in _overlays(spec))

    def scratch(self, spec: SandboxSpec) -> Iterator[Path]:
        """The directories that belong to the kernel, one for each overlay."""
        if self.image is not None:
            yield self.overlay_work
        yield from (self.overlay(index)[1] for index in _overlays(spec))

    def places(self, spec: SandboxSpec) -> dict[str, Path]:
        """The directories of `state` by their paths inside."""
        system = {} if self.image is None else {"/": self.upper}
        overlays = {spec.mounts[index].target: self.overlay(index)[0] for index in _overlays(spec)}
        return {**system, "/tmp": self.tmp, HOME: self.home, spec.workdir: self.work, **overlays}


def _overlays(spec: SandboxSpec) -> Iterator[int]:
    return (index for index, mount in enumerate(spec.mounts) if mount.overlay)


def check(spec: SandboxSpec) -> None:
    """Raises SandboxError where `spec` asks for what no sandbox can be."""
    targets = [spec.workdir, *spec.masks, *(mount.target for mount in spec.mounts)]
    for target in targets:
        path = PurePosixPath(target)
        if not path.is_absolute() or ".." in path.parts or path == PurePosixPath("/") or "\0" in target:
            raise SandboxError(f"not an absolute path inside the sandbox: {target!r}")
    for mount in spec.mounts:
        if mount.overlay and mount.writable:
            raise SandboxError(
                f"the mount at {mount.target} is both `overlay` and `writable`", hint="choose one of the two"
            )
    if spec.limits is not None and (wrong := _unusable(spec.limits)):
        raise SandboxError(f"not a usable limit: {wrong}")
    _check_network(spec)
    if not _HOSTNAME.fullmatch(spec.hostname):
        raise SandboxError(f"not a host name: {spec.hostname!r}")


def _check_network(spec: SandboxSpec) -> None:
    Policy(spec.network.allow)
    if spec.network.open and (spec.network.allow or spec.default_route):
        other = "allow" if spec.network.allow else "default_route"
        raise SandboxError(f"`{other}` makes no sense with an open network", hint="choose one of the two")


def default_environment(spec: SandboxSpec) -> dict[str, str]:
    """What the spec's own environment is put on top of."""
    if not spec.network.allow:
        return DEFAULT_ENV
    proxy = f"http://127.0.0.1:{PROXY_PORT}"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    local = dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1")
    return {**DEFAULT_ENV, **dict.fromkeys(names, proxy), **local}


def mount_points(spec: SandboxSpec) -> dict[str, bool]:
    """The paths inside at which something is mounted, and whether each is a directory."""
    directories = dict.fromkeys((*COVERED, spec.workdir, *spec.masks), True)
    return directories | {mount.target: mount.source.is_dir() for mount in spec.mounts}


def _unusable(limits: Limits) -> str:
    """Which limit leaves no room for the sandbox itself; empty where none does."""
    smallest = {
        "memory_bytes": 32 << 20,
        "processes": 24,
        "open_files": 1024,
        "cpus": 0.01,
        "disk_bytes": 1 << 20,
        "disk_files": 100,
        "file_bytes": 1 << 20,
        "wall_s": 0.1,
    }
    for name, least in smallest.items():
        value = getattr(limits, name)
        if value is not None and value < least:
            return f"{name} is {value}, the least is {least}"
    return ""


def bwrap_arguments(spec: SandboxSpec, mounts: Sequence[str]) -> list[str]:
    """Everything after the program's name but `--info-fd`.

    Args:
        mounts: of `mount_options`.
    """
    return [*_isolation(spec), *mounts, *INIT]


def mount_options(
    spec: SandboxSpec, files: SandboxFiles, *, system_masks: tuple[str, ...] = ()
) -> Iterator[str]:
    """What a sandbox sees, as bubblewrap's options: in order, for whatever makes it (see `making.py`).

    Args:
        system_masks: hidden beside the spec's own `masks`.
    """
    # What is in them is memory, which the end of no process gives back: never all that the sandbox may have.
    memory = spec.limits.memory_bytes if spec.limits is not None else None
    shm, run = (size if memory is None else min(size, memory // 4) for size in (_SHM_BYTES, _RUN_BYTES))
    yield from _host_system(spec, files) if files.image is None else _image_system(files.image, files)
    # Read-only as a whole: to the kernel, the user of a sandbox that root runs owns all of /proc/sys.
    yield from ("--proc", "/proc", *_kernel_masks(), "--remount-ro", "/proc", "--dev", "/dev")
    yield from ("--perms", "1777", "--size", str(shm), "--tmpfs", "/dev/shm", "--remount-ro", "/dev")
    yield from ("--perms", "755", "--size", str(run), "--tmpfs", "/run")
    yield from ("--bind", str(files.tmp), "/tmp")
    if files.image is None:
        yield from ("--dir", "/var", "--symlink", "/tmp", "/var/tmp")
    yield from ("--bind", str(files.home), HOME)
    yield from ("--bind", str(files.work), spec.workdir)
    for index, mount in enumerate(spec.mounts):
        yield from _mount(mount, files, index)
    for mask in (*spec.masks, *system_masks):
        yield from _mask(mask)
    if files.image is None:
        yield from ("--remount-ro", "/")


# The same for all sandboxes of this process, and looked up on the disk.
@functools.cache
def _kernel_masks() -> tuple[str, ...]:
    return tuple(kernel_masks())


@functools.cache
def _system_arguments() -> tuple[str, ...]:
    return tuple(system_arguments())


def has_own_names(spec: SandboxSpec) -> bool:
    """Whether the sandbox needs `hosts` and `hostname` files of its own, beside those of the shared /etc."""
    return spec.image is None and spec.hostname != DEFAULT_HOSTNAME


def _host_system(spec: SandboxSpec, files: SandboxFiles) -> Iterator[str]:
    yield from _system_arguments()
    yield from ("--ro-bind", str(files.etc), "/etc")
    if has_own_names(spec):
        yield from ("--ro-bind", f"{files.root}/hosts", "/etc/hosts")
        yield from ("--ro-bind", f"{files.root}/hostname", "/etc/hostname")


def _image_system(image: Path, files: SandboxFiles) -> Iterator[str]:
    yield from ("--overlay-src", str(image), "--overlay", str(files.upper), str(files.overlay_work), "/")


def _isolation(spec: SandboxSpec) -> Iterator[str]:
    for namespace in ("user", "pid", "net", "ipc", "uts", "cgroup"):
        if namespace != "net" or not spec.network.open:
            yield f"--unshare-{namespace}"
    # No further user namespaces inside: they give back every capability against the kernel's own code.
    yield "--disable-userns"
    # Not --die-with-parent: it follows the thread that forked, and it can kill bubblewrap before its child is
    # told to go on, which then waits forever. The first process's lifetime socket has neither fault.
    yield from ("--new-session", "--as-pid-1", "--clearenv")
    yield from ("--uid", str(spec.uid), "--gid", str(spec.uid), "--hostname", spec.hostname)
    # The first process keeps one capability, which is without power in a user namespace. It makes the
    # process more privileged than all others inside, so that none can trace it and take its lifetime socket.
    yield from ("--cap-drop", "ALL", "--cap-add", "CAP_SYS_PACCT")


def _mount(mount: Mount, files: SandboxFiles, index: int) -> Iterator[str]:
    if mount.overlay:
        upper, work = files.overlay(index)
        yield from ("--overlay-src", str(mount.source), "--overlay", str(upper), str(work), mount.target)
    else:
        yield from ("--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target)


def _mask(target: str) -> Iterator[str]:
    yield from ("--perms", "555", "--size", "4096", "--tmpfs", target, "--remount-ro", target)
