"""Translation of a `SandboxSpec` to bubblewrap's command line. All drivers that use namespaces follow its
mount options. Pure: starts no process, changes no file."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import (
    DEFAULT_HOSTNAME,
    PROXY_PORT,
    FrozenTree,
    Mount,
    SandboxLimits,
    SandboxSpec,
)
from prorl_envs.sandbox.filesystem.host_system import kernel_masks, system_arguments
from prorl_envs.sandbox.network.policy import Policy

HOME, ROOT_HOME = "/home/agent", "/root"
DEFAULT_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "LANG": "C.UTF-8",
    "TERM": "xterm-256color",
}

#: The first process: reports that the mounts are done, then waits for EOF on its standard input, a socket
#: held by the host, and reaps orphans meanwhile. As pid 1 of its namespace, no signal from inside kills it.
#: In dash, an ignored SIGCHLD makes `read` fail. So SIGCHLD is trapped, a failed `read` counts as EOF only
#: if no child has died, and `jobs` reaps. dash installs its own handler for an interrupt and could be killed
#: by one, so all signals that can be ignored are ignored.
INIT = (
    "/bin/sh",
    "-c",
    "trap '' HUP INT QUIT ALRM TERM USR1 USR2 TSTP TTIN TTOU; trap 'died=1' CHLD; "
    'echo ready; while died=; read _ || [ "$died" ]; do jobs; done',
)
#: Directories of every sandbox that are mounted over those of its image.
_KERNELS = ("/proc", "/dev")
_COVERED = (*_KERNELS, "/run", "/tmp", HOME)

#: Links in the root of a sandbox without an image.
_ROOT_LINKS = {"/var/tmp": "/tmp"}

_HOSTNAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}")
_SHM_BYTES = 256 << 20
_RUN_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SandboxFiles:
    """Host directories of one sandbox, in the driver's directory.

    Args:
        root: the sandbox's own directory, which contains the others.
        etc: its `/etc`, shared by all sandboxes with the same uid.
        layers: the root file system of the spec's image, the lowest directory first; empty without an image.
        frozen: layers of checkpoints below its directories, by their paths inside; the highest first.
    """

    root: Path
    etc: Path
    layers: tuple[Path, ...] = ()
    frozen: dict[str, tuple[FrozenTree, ...]] = field(default_factory=dict)

    @property
    def upper(self) -> Path:
        """The sandbox's changes to its image."""
        return self.root / "upper"

    @property
    def overlay_work(self) -> Path:
        """Work directory of the overlay, which belongs to the kernel."""
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
        """Return the upper and the work directory of the mount at `index`."""
        return self.root / f"upper{index}", self.root / f"overlay{index}"

    def directories(self, spec: SandboxSpec) -> Iterator[Path]:
        """Yield the directories with the sandbox's files, and those of its overlays that the kernel uses."""
        for target, upper in self.private(spec).items():
            yield upper
            if target in self.frozen:
                yield self.overlay_of(upper)
        if self.layers:
            yield from (self.upper, self.overlay_work)
        for index in _overlays(spec):
            yield from self.overlay(index)

    def overlay_of(self, upper: Path) -> Path:
        """Return the work directory of an overlay with this upper directory."""
        return upper.with_name(f"{upper.name}.overlay")

    def below(self, target: str) -> tuple[Path, ...]:
        """Return the layers of checkpoints at a path inside, the lowest first."""
        return tuple(tree.path for tree in reversed(self.frozen.get(target, ())))

    def private(self, spec: SandboxSpec) -> dict[str, Path]:
        """Return the directories that are mounts of their own by their paths inside."""
        return {} if spec.emulate_root else {"/tmp": self.tmp, HOME: self.home, spec.workdir: self.work}

    def places(self, spec: SandboxSpec) -> dict[str, Path]:
        """Return the directories with the sandbox's files by their paths inside."""
        system = {"/": self.upper} if self.layers else {}
        overlays = {spec.mounts[index].target: self.overlay(index)[0] for index in _overlays(spec)}
        return {**system, **self.private(spec), **overlays}


def _overlays(spec: SandboxSpec) -> Iterator[int]:
    return (index for index, mount in enumerate(spec.mounts) if mount.overlay)


def check(spec: SandboxSpec) -> None:
    """Raise SandboxError if `spec` is invalid."""
    workdir = () if spec.emulate_root and spec.workdir == "/" else (spec.workdir,)
    targets = [*workdir, *spec.masks, *(mount.target for mount in spec.mounts)]
    for target in targets:
        path = PurePosixPath(target)
        if not path.is_absolute() or ".." in path.parts or path == PurePosixPath("/") or "\0" in target:
            raise SandboxError(f"not an absolute path inside the sandbox: {target!r}")
    texts = [*spec.env, *spec.env.values(), *(str(mount.source) for mount in spec.mounts)]
    if any("\0" in text for text in texts):
        raise SandboxError("a variable or the source of a mount contains a zero byte")
    for mount in spec.mounts:
        if mount.overlay and mount.writable:
            raise SandboxError(
                f"the mount at {mount.target} is both `overlay` and `writable`", hint="choose one of the two"
            )
    if spec.emulate_root and spec.image is None:
        raise SandboxError(
            "`emulate_root` needs an image: the host's own system is read-only", hint="give one as `image`"
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


def through_links(spec: SandboxSpec) -> SandboxSpec:
    """Return `spec` with links of the root file system resolved in every path inside.

    For sandboxes without an image: a mount at /var/tmp/x would otherwise find no directory.
    """
    if spec.image is not None:
        return spec
    mounts = tuple(replace(mount, target=_through_link(mount.target)) for mount in spec.mounts)
    masks = tuple(map(_through_link, spec.masks))
    return replace(spec, workdir=_through_link(spec.workdir), mounts=mounts, masks=masks)


def _through_link(path: str) -> str:
    for link, destination in _ROOT_LINKS.items():
        if path.startswith(f"{link}/"):
            return destination + path[len(link) :]
    return path


def default_environment(spec: SandboxSpec) -> dict[str, str]:
    """Return the default environment; the spec's own variables override it."""
    basic = {**DEFAULT_ENV, "HOME": ROOT_HOME} if spec.emulate_root else DEFAULT_ENV
    if not spec.network.allow:
        return basic
    proxy = f"http://127.0.0.1:{PROXY_PORT}"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    direct = ",".join(("localhost", "127.0.0.1", "::1", *spec.hosts))
    local = dict.fromkeys(("no_proxy", "NO_PROXY"), direct)
    return {**basic, **dict.fromkeys(names, proxy), **local}


def covered(spec: SandboxSpec) -> tuple[str, ...]:
    """Return the directories inside that are mounted over those of the image in every such sandbox."""
    return _KERNELS if spec.emulate_root else _COVERED


def mount_points(spec: SandboxSpec) -> dict[str, bool]:
    """Return the paths inside at which something is mounted, and whether each is a directory."""
    private = () if spec.emulate_root else (spec.workdir,)
    directories = dict.fromkeys((*covered(spec), *private, *spec.masks), True)
    return directories | {mount.target: mount.source.is_dir() for mount in spec.mounts}


def _unusable(limits: SandboxLimits) -> str:
    """Describe the limit that is too low for the sandbox itself; "" if none is."""
    smallest = {
        "memory_bytes": 32 << 20,
        "processes": 24,
        "open_files": 1024,
        "cpus": 0.01,
        "disk_bytes": 1 << 20,
        "disk_files": 100,
        "file_bytes": 1 << 20,
        "lifetime_s": 0.1,
    }
    for name, minimum in smallest.items():
        value = getattr(limits, name)
        if value is not None and value < minimum:
            return f"{name} is {value}, the minimum is {minimum}"
    return ""


def bwrap_arguments(spec: SandboxSpec, mounts: Sequence[str]) -> list[str]:
    """Return bubblewrap's arguments, without `--info-fd`.

    Args:
        mounts: result of `mount_options`.
    """
    return [*_isolation(spec), *mounts, *INIT]


def shared_memory_bytes(spec: SandboxSpec) -> int:
    """Return the limit of /dev/shm, and of all System V shared memory, in bytes.

    Killing a process does not free their content, so they may never take all the memory of the sandbox.
    """
    memory = spec.limits.memory_bytes if spec.limits is not None else None
    return _SHM_BYTES if memory is None else min(_SHM_BYTES, memory // 4)


def mount_options(
    spec: SandboxSpec, files: SandboxFiles, *, system_masks: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield a sandbox's mounts as bubblewrap options, in order.

    Args:
        system_masks: paths that are hidden in addition to the spec's `masks`.
    """
    memory = spec.limits.memory_bytes if spec.limits is not None else None
    run = _RUN_BYTES if memory is None else min(_RUN_BYTES, memory // 4)
    yield from _image_system(files) if files.layers else _host_system(spec, files)
    # All of /proc is read-only: if root runs the sandbox, the kernel would let its user write /proc/sys.
    yield from ("--proc", "/proc", *kernel_masks(), "--remount-ro", "/proc", "--dev", "/dev")
    shm = shared_memory_bytes(spec)
    yield from ("--perms", "1777", "--size", str(shm), "--tmpfs", "/dev/shm", "--remount-ro", "/dev")
    if not spec.emulate_root:
        yield from ("--perms", "755", "--size", str(run), "--tmpfs", "/run")
        yield from _private(files, files.tmp, "/tmp")
        if not files.layers:
            for link, destination in _ROOT_LINKS.items():
                yield from ("--dir", str(PurePosixPath(link).parent), "--symlink", destination, link)
        yield from _private(files, files.home, HOME)
        yield from _private(files, files.work, spec.workdir)
    for index, mount in enumerate(spec.mounts):
        yield from _mount(mount, files, index)
    for mask in (*spec.masks, *system_masks):
        yield from _mask(mask)
    if not files.layers:
        yield from ("--remount-ro", "/")


def has_own_names(spec: SandboxSpec) -> bool:
    """Return True if the sandbox needs `hosts` and `hostname` files other than those of the shared /etc."""
    return spec.emulate_root or (
        spec.image is None and (spec.hostname != DEFAULT_HOSTNAME or bool(spec.hosts))
    )


def _host_system(spec: SandboxSpec, files: SandboxFiles) -> Iterator[str]:
    yield from system_arguments()
    yield from ("--ro-bind", str(files.etc), "/etc")
    if has_own_names(spec):
        yield from ("--ro-bind", f"{files.root}/hosts", "/etc/hosts")
        yield from ("--ro-bind", f"{files.root}/hostname", "/etc/hostname")


def _private(files: SandboxFiles, upper: Path, target: str) -> Iterator[str]:
    if layers := files.below(target):
        yield from _overlay(layers, upper, files.overlay_of(upper), target)
    else:
        yield from ("--bind", str(upper), target)


def _overlay(layers: Sequence[Path], upper: Path, work: Path, target: str) -> Iterator[str]:
    for layer in layers:
        yield from ("--overlay-src", str(layer))
    yield from ("--overlay", str(upper), str(work), target)


def _image_system(files: SandboxFiles) -> Iterator[str]:
    yield from _overlay((*files.layers, *files.below("/")), files.upper, files.overlay_work, "/")


def _isolation(spec: SandboxSpec) -> Iterator[str]:
    for namespace in ("user", "pid", "net", "ipc", "uts", "cgroup"):
        if namespace != "net" or not spec.network.open:
            yield f"--unshare-{namespace}"
    # No further user namespaces inside: they give access to kernel code that needs capabilities.
    yield "--disable-userns"
    # Not --die-with-parent: it follows the thread that forked, and it can kill bubblewrap before its child is
    # released, so that the child waits forever. The first process's lifetime socket has neither fault.
    yield from ("--new-session", "--as-pid-1", "--clearenv")
    yield from ("--uid", str(spec.uid), "--gid", str(spec.uid), "--hostname", spec.hostname)
    # The first process keeps one capability, which allows nothing in a user namespace. It makes the process
    # more privileged than all others inside, so that none can trace it and take its lifetime socket.
    yield from ("--cap-drop", "ALL", "--cap-add", "CAP_SYS_PACCT")


def _mount(mount: Mount, files: SandboxFiles, index: int) -> Iterator[str]:
    layers = (*reversed(mount.below), mount.source)
    if mount.overlay:
        upper, work = files.overlay(index)
        yield from _overlay((*layers, *files.below(mount.target)), upper, work, mount.target)
    elif mount.below:
        for layer in layers:
            yield from ("--overlay-src", str(layer))
        yield from ("--ro-overlay", mount.target)
    else:
        yield from ("--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target)


def _mask(target: str) -> Iterator[str]:
    yield from ("--perms", "555", "--size", "4096", "--tmpfs", target, "--remount-ro", target)
