"""Interfaces that every sandbox driver implements. Independent of tools, tasks and models."""

import asyncio
import itertools
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from prorl_envs.errors import SandboxError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """Host path that appears in the sandbox.

    Args:
        source: path on the host; must exist when the sandbox starts.
        target: absolute path inside.
        writable: False binds read-only. True gives the sandbox the host path itself: only for directories
            made for this sandbox.
        overlay: True makes `target` a private writable copy-on-write view of `source` (a directory); the
            source never changes, and the changes are discarded with the sandbox.
        below: directories that are layers below `source`, the highest first.
    """

    source: Path
    target: str
    writable: bool = False
    overlay: bool = False
    below: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Resource limits of a sandbox; None means no limit. See docs/decisions/limits.md for their enforcement.

    Args:
        memory_bytes: of all its processes together, including shared memory and files in memory.
        processes: simultaneous processes, and threads too if the kernel enforces the limit; 32 or more.
        open_files: per process; 1,024 or more, because the tools use high numbers.
        cpus: CPU time in processors; enforced only by cgroups.
        disk_bytes: of all files it wrote; writable mounts of the host's own directories do not count.
        disk_files: files and directories it created.
        file_bytes: of one file; None means `disk_bytes`.
        lifetime_s: seconds from its start until it is closed.
    """

    memory_bytes: int | None = 8 << 30
    processes: int | None = 2048
    open_files: int = 65536
    cpus: float | None = None
    disk_bytes: int | None = 16 << 30
    disk_files: int | None = 1_000_000
    file_bytes: int | None = None
    lifetime_s: float | None = None


DEFAULT_HOSTNAME = "sandbox"
#: Port of the proxy on the loopback interface of a sandbox with `Network.allow`.
PROXY_PORT = 3128


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Network access of a sandbox beyond its own loopback; none by default.

    Args:
        allow: hosts reachable through an HTTP proxy at 127.0.0.1, port `PROXY_PORT`, which the usual
            environment variables name: `host`, `host:port`, `*.host` (names below it, not the host itself) or
            `*.host:port`. Without a port, 80 and 443. A name that resolves to an address that is not
            public is refused, unless the address is listed too, or `private:` precedes the name. No other way
            out exists: programs without proxy support reach nothing, and there is no name service.
        open: True gives it the host's network itself, including services on the host's loopback and the
            host's abstract sockets.
        reason: why it is open, for the log.
    """

    allow: tuple[str, ...] = ()
    open: bool = False
    reason: str = field(default="", compare=False)


class FrozenTree:
    """Directory that nobody changes any more: a layer of the sandboxes and checkpoints that share it.

    Args:
        path: the directory.
        remove: removes it; called in a thread when its last user releases it. It is created with one user.
    """

    def __init__(self, path: Path, remove: Callable[[Path], None]) -> None:
        self.path = path
        self._remove = remove
        self._users = 1

    def share(self) -> Self:
        """Add a user."""
        self._users += 1
        return self

    async def release(self) -> None:
        """Remove a user."""
        self._users -= 1
        if self._users == 0:
            await asyncio.to_thread(self._remove, self.path)


@dataclass(slots=True, eq=False)
class Checkpoint:
    """State of a sandbox at one moment, with which new sandboxes can begin. Its caller closes it.

    Args:
        trees: its directories by their paths inside, the highest layer first.
        memory: descriptor of the saved memory of the Python session; None if there was no session.
        copied: why files were copied, and not shared with the sandbox; empty if they are shared.
        lost: what new sandboxes do not have: programs, threads, open files.
        shells: state and last status of each shell by the name of its session. The toolbox adds them.
    """

    trees: Mapping[str, tuple[FrozenTree, ...]]
    memory: int | None
    copied: tuple[str, ...]
    lost: tuple[str, ...]
    shells: Mapping[str, tuple[bytes, int]] = field(default_factory=dict)

    async def close(self) -> None:
        """Free its files and memory, once the last sandbox that shares them has closed. Idempotent."""
        trees, self.trees = self.trees, {}
        memory, self.memory = self.memory, None
        if memory is not None:
            os.close(memory)
        for tree in itertools.chain(*trees.values()):
            await tree.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Configuration of a sandbox. Isolated by default: own user, mount, pid, net, ipc, uts and cgroup
    namespaces, the system read-only, no host environment, no network but loopback unless `network` allows it.

    Args:
        image: the root file system inside: a directory, a SIF file, or a layered image's `.layers.json` file.
            None is the host's own system, read-only. An image appears as a private copy-on-write view, which
            can be changed as its permissions allow; the image itself never changes. It only needs `/bin/sh`.
            Files of other host users (root, in most SIF files) belong to the overflow user inside.
        workdir: absolute path of the private writable workspace inside; also the initial working directory.
            `/` only with `emulate_root`.
        env: the complete environment of processes inside, on top of PATH, HOME, LANG, TERM.
        mounts: further host paths that appear inside, in order.
        masks: absolute paths inside that are hidden behind an empty read-only directory, after `mounts`.
        hostname: host name inside.
        hosts: addresses of other names that programs inside use, by name.
        uid: user id inside (0 looks like root but has no capabilities).
        emulate_root: True makes the processes root of the image, for package managers and tasks that need it:
            `uid` is 0, all of the image can be written, and system calls that need a privilege (chown,
            setuid, mknod, setting attributes) report success without effect. The image is the whole system:
            `/tmp`, `/run`, `/root` and `workdir` are directories of the image, not mounts. Needs an image.
            See docs/decisions/root-emulation.md.
        default_route: True gives the loopback interface a default route, so that connections to addresses
            outside time out as on a filtered network instead of failing at once.
        limits: resource limits; None means the driver's.
        network: network access.
        checkpoint: checkpoint of a sandbox with an equal spec, with whose files this one begins.
    """

    image: Path | None = None
    workdir: str = "/workspace"
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    masks: tuple[str, ...] = ()
    hostname: str = DEFAULT_HOSTNAME
    hosts: Mapping[str, str] = field(default_factory=dict)
    uid: int = 1000
    emulate_root: bool = False
    default_route: bool = False
    limits: SandboxLimits | None = None
    network: Network = field(default_factory=Network)
    checkpoint: Checkpoint | None = None


@runtime_checkable
class Sandbox(Protocol):
    """Running sandbox. The caller that started it closes it; it stops with the process that started it.

    What is implemented here is what a sandbox does without further parts, such as one of another process.
    """

    @property
    def id(self) -> str:
        """Unique ID on this node."""
        ...

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def workspace(self) -> Path:
        """Host path of the directory seen inside as `spec.workdir`, until the sandbox is closed. Content is
        hostile: never follow links in it, never run anything from it on the host.

        Raises:
            SandboxError: no directory on the host holds all of its content: the image has the directory, or a
                checkpoint was taken.
        """
        raise SandboxError(f"this process cannot access the files of sandbox {self.id}")

    @property
    def socket_directory(self) -> tuple[str, Path]:
        """Directory for Unix sockets: processes inside listen on them, and the host connects to them. A pair
        of its path inside (absolute, or relative to `workdir`) and its path on the host. Removed when the
        sandbox is closed. Its content is as hostile as that of `workspace`.
        """
        return "", self.workspace  # relative: a socket's path has at most 107 bytes

    def path_inside(self, path: str, *, write: bool = False) -> str:
        """Return the path that processes inside use for a path of the spec, such as one below `workdir`.

        Args:
            path: absolute, or relative to `workdir`.
            write: whether the caller will write there.

        Raises:
            SandboxError: `write` is True, and the path does not belong to this sandbox alone.
        """
        return path

    @property
    def alive(self) -> bool: ...

    def end_error(self) -> SandboxError:
        """Return the error for users of a stopped sandbox: `SandboxLimit` if a limit was the cause."""
        return SandboxError(f"sandbox {self.id} has ended")

    def pop_notices(self) -> list[str]:
        """Return one sentence, for the model, per action that enforced a limit since the last call.

        Cheap, and never waits: a few microseconds if nothing happened.
        """
        return []

    def memory(self) -> int | None:
        """Return the bytes of memory that its processes hold now, as counted towards the limit; None if they
        cannot be separated from other processes' memory, or the sandbox has stopped. Blocks for some 0.1 ms.
        """
        return None

    async def spawn(self, entry: str, *, template: str = "base") -> socket.socket:
        """Fork a process from a template into this sandbox and run `entry` there.

        Args:
            entry: `package.module:function`, from the template's fixed list. It is called with a connected
                stream socket; `spawn` returns the other end. The process leads a session; processes that it
                starts need sessions of their own (signals to a process group cross pid namespaces).
            template: which warm process to fork: `base`, or `ipython` (IPython already imported).

        Raises:
            SandboxError: the sandbox has stopped, or the process could not join it.
        """
        ...

    async def listen_loopback(self) -> socket.socket:
        """Return a socket that listens on a free port of the sandbox's own loopback. Only processes inside
        can connect to it. The caller owns it, accepts connections outside, and closes it before the sandbox.

        Raises:
            SandboxError: the sandbox has stopped, or the kernel refused.
        """
        raise SandboxError(f"this process cannot listen in sandbox {self.id}")

    async def take_layer(self, target: Path) -> None:
        """Close the sandbox, and move its changes to the image to `target`, as an overlayfs layer.

        Args:
            target: new or empty directory in an existing one. Moving takes one rename if it is on the file
                system of the sandboxes, and a copy otherwise.

        Raises:
            SandboxError: the sandbox has no image or has stopped, or its files cannot be moved.
        """
        raise SandboxError(f"the changes of sandbox {self.id} to its image cannot be taken")

    async def close(self) -> None:
        """Kill all processes in the sandbox and remove its files. Idempotent; safe under cancellation."""
        ...


@runtime_checkable
class CheckpointingSandbox(Sandbox, Protocol):
    """Sandbox whose state can be saved and restored."""

    @property
    def workspace_layers(self) -> tuple[Path, ...]:
        """The directories on the host that make up its workspace, the highest layer first."""
        ...

    async def checkpoint(self, *, shells: Sequence[int] = (), python: int | None = None) -> Checkpoint:
        """Save the state of the sandbox, which goes on. Its programs stop meanwhile, and notice nothing.

        The files take no copying unless a program has some open for writing; see `Checkpoint.copied`.

        Args:
            shells: pids of its shells, as the tool server knows them.
            python: pid of its Python session, whose memory is saved.

        Raises:
            SandboxError: the sandbox has stopped, or the kernel refused.
        """
        ...

    async def restore_memory(self, python: int, *, file: int) -> None:
        """Give a new Python session the memory of the spec's checkpoint.

        Args:
            python: pid of the session, as the tool server knows it.
            file: the session's descriptor of the memory.

        Raises:
            SandboxError: the memory cannot be restored.
        """
        ...


@runtime_checkable
class Driver(Protocol):
    """Factory of sandboxes on this node."""

    @property
    def name(self) -> str: ...

    @property
    def sandboxes(self) -> Collection[Sandbox]:
        """Sandboxes that are not closed yet."""
        ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox and return it once its first process runs.

        Args:
            spec: its configuration.

        Raises:
            SandboxError: with the driver's own message, and a remedy as hint.
        """
        ...

    async def aclose(self) -> None:
        """Close every sandbox still open, stop the templates, remove the driver's directory."""
        ...


def workspace_mount(sandbox: Sandbox, target: str) -> Mount:
    """Return a read-only mount of a sandbox's workspace at `target` of another sandbox.

    Raises:
        SandboxError: see `Sandbox.workspace`.
    """
    if isinstance(sandbox, CheckpointingSandbox):
        source, *below = sandbox.workspace_layers
        return Mount(source=source, target=target, below=tuple(below))
    return Mount(source=sandbox.workspace, target=target)
