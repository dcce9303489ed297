"""The contract every sandbox driver keeps. Knows nothing of tools, tasks or models."""

import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from prorl_envs.sandbox.snapshot import Snapshot

from prorl_envs.errors import SandboxError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A host path that appears in the sandbox.

    Args:
        source: path on the host; must exist when the sandbox starts.
        target: absolute path inside.
        writable: False binds read-only. True gives the sandbox the host path itself: only for
            directories made for this sandbox.
        overlay: True makes `target` a private writable copy-on-write view of `source` (a directory);
            the source never changes and the changes end with the sandbox.
    """

    source: Path
    target: str
    writable: bool = False
    overlay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a sandbox may use; None is no bound. How each is kept depends on the machine: see decision 0017.

    Args:
        memory_bytes: of all its processes together, shared memory and files in memory included.
        processes: that live at a time, threads counted where the kernel itself keeps the limit; 32 or more.
        open_files: of each process; 1,024 or more, for the tools use high numbers.
        cpus: processors' worth of time; kept by cgroups alone.
        disk_bytes: of all files it wrote; writable mounts of the host's own directories do not count.
        disk_files: files and directories it made.
        file_bytes: of one file; where it is None, `disk_bytes`.
        wall_s: seconds from its start, after which it is closed.
    """

    memory_bytes: int | None = 8 << 30
    processes: int | None = 2048
    open_files: int = 65536
    cpus: float | None = None
    disk_bytes: int | None = 16 << 30
    disk_files: int | None = 1_000_000
    file_bytes: int | None = None
    wall_s: float | None = None


DEFAULT_HOSTNAME = "sandbox"
#: Where, on a sandbox's loopback, the proxy of one with `Network.allow` listens.
PROXY_PORT = 3128


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a sandbox can connect to beside its own loopback; by default nothing.

    Args:
        allow: hosts that are reached through an HTTP proxy at 127.0.0.1, port `PROXY_PORT`, which the usual
            environment variables name: `host`, `host:port`, `*.host` (what is below, and not itself) or
            `*.host:port`. Without a port, 80 and 443. Names that lead to addresses which are not public are
            refused unless that address is listed as well. There is still no other way out: programs that
            know no proxy reach nothing, and there is no name service.
        open: True gives it the host's network itself, the services on the host's loopback and its abstract
            sockets included.
    """

    allow: tuple[str, ...] = ()
    open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox should look like. Isolated by default: own user, mount, pid, net, ipc, uts and cgroup
    namespaces, the system read-only, no host environment, no network but loopback unless `network` asks.

    Args:
        image: the system inside: a directory with a root file system, or a SIF file. None is the host's own
            system, read-only. An image is a private copy-on-write view: all of it can be changed where its
            permissions allow, and the image never changes. It needs `/bin/sh` and nothing else. What belongs
            to other users than this one on the host (root, in most images) belongs to nobody inside.
        workdir: absolute path of the private writable workspace inside; also the first working directory.
        env: the complete environment of processes inside, on top of PATH, HOME, LANG, TERM.
        mounts: further host paths that appear inside, in order.
        masks: absolute paths inside that are hidden behind an empty read-only directory, after `mounts`.
        hostname: name the sandbox sees itself under.
        uid: user id inside (0 looks like root and still has no capability).
        default_route: True gives the loopback interface a default route, so that connections to
            addresses outside time out as on a filtered network instead of failing at once.
        limits: what it may use; None takes the driver's.
        network: what it can connect to.
    """

    image: Path | None = None
    workdir: str = "/workspace"
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    masks: tuple[str, ...] = ()
    hostname: str = DEFAULT_HOSTNAME
    uid: int = 1000
    default_route: bool = False
    limits: Limits | None = None
    network: Network = field(default_factory=Network)


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalPlan:
    """A program to begin on a pseudo-terminal of its own, as the sandbox's maker does.

    Args:
        programs: absolute paths inside, tried in turn.
        arguments: what follows the program's own name.
        env: its whole environment.
        settings: the terminal's, as TCSETS takes them (the kernel's `struct termios`, 36 bytes).
        size: rows and columns.
        text_fd, report_fd: its descriptors of a memory file and of the writing end of a pipe.
    """

    programs: tuple[str, ...]
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    settings: bytes
    size: tuple[int, int]
    text_fd: int
    report_fd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A program that runs on a terminal; the descriptors are their taker's.

    Args:
        pid: its number on the host; -1 where it has ended already.
        terminal: the master's side, non-blocking.
        report: the reading end of the pipe, non-blocking.
        process: its pidfd.
        text: the memory file.
        exits: socket on which the process's parent tells how each of its children ended, as `siginfo_t` (128
            bytes) from waitid(2); the sandbox's first process is the only other. End of file where the parent
            is gone.
    """

    pid: int
    terminal: int
    report: int
    process: int
    text: int
    exits: int


@runtime_checkable
class Sandbox(Protocol):
    """A running sandbox. Whoever started it closes it; it ends with the process that started it."""

    @property
    def id(self) -> str:
        """Unique on this node."""
        ...

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def workspace(self) -> Path:
        """Host path of the directory seen inside as `spec.workdir`, until the sandbox is closed. Content is
        hostile: never follow links in it, never run anything from it on the host."""
        ...

    @property
    def alive(self) -> bool: ...

    def ended(self) -> SandboxError:
        """The error for whoever uses it after its end: `SandboxLimit` where the driver ended it for one."""
        ...

    def take_notices(self) -> list[str]:
        """What was done to keep its limits since the last call, for the model to read: one sentence each.

        Cheap, and never waits: a few microseconds where nothing happened.
        """
        ...

    def memory(self) -> int | None:
        """Bytes of memory that what runs in it holds now, as they count towards its limit; None where that
        cannot be told apart from others', or it has ended. Blocks for some tenths of a millisecond."""
        ...

    async def spawn(self, entry: str, *, template: str = "base") -> socket.socket:
        """Fork a process from a template into this sandbox and run `entry` there.

        Args:
            entry: `package.module:function`, from the template's fixed list. It is called with one
                connected stream socket, whose other end is returned. It is the leader of a session; what
                it starts must get one of its own (signals to a process group pass through namespaces).
            template: which warm process to fork: `base`, or `ipython` (IPython already imported).

        Raises:
            SandboxError: the sandbox has ended, or the process could not join it.
        """
        ...

    async def begin_shell(self) -> Begun | None:
        """Begin the shell that `tools.born.plan` describes, without a tool server; once for a sandbox.

        Returns:
            what it is driven by; None where there is no such shell, or it was begun before: a tool server can
            begin others.

        Raises:
            SandboxError: the sandbox has ended.
        """
        ...

    async def listen(self) -> socket.socket:
        """A socket that listens on the sandbox's own loopback, at a free port: for services of whoever runs
        it. What connects is inside, whoever accepts is outside, and no other way leads there.

        Returns:
            the socket, which the caller owns and closes before the sandbox.

        Raises:
            SandboxError: the sandbox has ended, or the kernel refused.
        """
        ...

    async def snapshot(self) -> "Snapshot":
        """Copy the files of the sandbox, which goes on; see `snapshot.Snapshot` for what is captured.

        Raises:
            SandboxError: the sandbox has ended, or its files cannot be copied.
        """
        ...

    async def close(self) -> None:
        """End everything in the sandbox and remove its files. Idempotent; safe under cancellation."""
        ...


@runtime_checkable
class Driver(Protocol):
    """Starts sandboxes on this node."""

    @property
    def name(self) -> str: ...

    @property
    def sandboxes(self) -> Collection[Sandbox]:
        """Those not yet closed."""
        ...

    async def start(self, spec: SandboxSpec, *, snapshot: "Snapshot | None" = None) -> Sandbox:
        """Start a sandbox and return it once its first process runs.

        Args:
            spec: what it should look like.
            snapshot: what its files are copied from; None starts with empty directories.

        Raises:
            SandboxError: with the driver's own words and a remedy as hint.
        """
        ...

    async def aclose(self) -> None:
        """Close every sandbox still open, end the templates, remove the driver's directory."""
        ...
