"""Driver without isolation, for trusted use on machines that allow no user namespaces.

Contract and tool server are the same, but a sandbox's programs have all rights of this user.
"""

import asyncio
import os
import signal
import socket
import time
import warnings
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from pathlib import Path, PurePosixPath

from prorl_envs.errors import SandboxError, UnsupportedMachine
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.base import NodeDriver, NodeSandbox
from prorl_envs.sandbox.filesystem.mount_plan import DEFAULT_ENV
from prorl_envs.sandbox.limits.enforcement import DEFAULT_LIMITS, NodeLimits
from prorl_envs.sandbox.linux.descriptors import has_exited
from prorl_envs.sandbox.template.process import ForkRequest
from prorl_envs.sandbox.template.template import TEMPLATES, TemplateSpec

#: Environment variable that marks every process of a sandbox, because no pid namespace contains them.
MARK = "PRORL_LOCAL_SANDBOX"
_KERNEL_THREAD = 0x0020_0000
#: Seconds in which the killed processes of a sandbox must exit.
_END_S = 10.0
#: Consecutive scans with no worse result than `_Found.ENDED`, after which no process of the sandbox is left.
#: On a machine that starts programs all the time, nearly every scan has this result.
_LAST_SCANS = 5
#: Seconds between two scans: killed processes need the processor to exit.
_PAUSE_S = 0.001


class NoIsolationWarning(UserWarning):
    """Commands run unconfined on this machine."""


class LocalDriver(NodeDriver["LocalSandbox"]):
    """Runs "sandboxes" as plain directories, without any isolation, and warns of that.

    Args:
        root: see `NodeDriver`.
        templates: see `NodeDriver`.
        limits: see `NodeDriver`; only limits per process, of the disk and of the lifetime are enforced.

    Raises:
        SandboxError: no directory can be created.
    """

    name = "local"

    def __init__(
        self,
        root: Path | None = None,
        *,
        templates: Mapping[str, TemplateSpec] = TEMPLATES,
        limits: NodeLimits = DEFAULT_LIMITS,
    ) -> None:
        warnings.warn(
            "LocalDriver isolates nothing: whatever a model writes runs as you on this machine",
            NoIsolationWarning,
            stacklevel=2,
        )
        super().__init__(root, templates=templates, limits=limits)

    @property
    def enforced_limits(self) -> frozenset[str]:
        """Enforced limits, without those that require a count of the sandbox's processes."""
        return super().enforced_limits - {"cpus", "memory_bytes", "processes"}

    async def _make(self, spec: SandboxSpec) -> "LocalSandbox":
        _refuse_mounts(spec)
        _refuse_allowlist(spec)
        sandbox_id, root = self._place()
        return LocalSandbox(sandbox_id, spec, root, self)


class LocalSandbox(NodeSandbox):
    """A directory and the processes started in it.

    The path `spec.workdir` does not exist: processes start in the workspace directory, and tools use it for
    paths below `spec.workdir`. A `Toolbox` writes nothing elsewhere; programs inside can.
    """

    _own_users = False

    async def launch(self) -> None:
        """Create the directories; there is no first process."""
        for path in (self._root, *(self._root / name for name in ("work", "home", "tmp"))):
            path.mkdir(mode=0o700)

    def path_inside(self, path: str, *, write: bool = False) -> str:
        """See `Sandbox.path_inside`."""
        wanted = PurePosixPath(os.path.normpath(PurePosixPath(self._spec.workdir, path)))
        if wanted.is_relative_to(self._spec.workdir):
            return str(self.workspace / wanted.relative_to(self._spec.workdir))
        if write and not wanted.is_relative_to(self._root):
            raise UnsupportedMachine(
                f"the local driver does not write outside its sandbox: {path}",
                hint=f"write below {self._spec.workdir}, or use a driver that isolates",
            )
        return path

    def _open_namespaces(self) -> int:
        return os.open(self.workspace, os.O_PATH | os.O_DIRECTORY)

    def _request(self, entry: str) -> ForkRequest:
        private = {"HOME": str(self._root / "home"), "TMPDIR": str(self._root / "tmp"), MARK: self.id}
        env = {**DEFAULT_ENV, **private, **self._spec.env}
        return ForkRequest(entry=entry, workdir=str(self.workspace), env=env, isolated=False)

    async def listen_loopback(self) -> socket.socket:
        """See `Sandbox.listen_loopback`. Warns, because others can connect to the host's loopback."""
        if not self.alive:
            raise self.end_error()
        warnings.warn(
            "a service for a local sandbox listens on this machine's own loopback: all its users can "
            "connect, and only the service's key protects it",
            NoIsolationWarning,
            stacklevel=2,
        )
        return socket.create_server(("127.0.0.1", 0))

    async def _end(self) -> None:
        """Kill the tool servers' children and the processes that carry this sandbox's mark, then the servers.

        A stopped tool server starts no programs. Until it is killed, its children are known by their parent:
        one that has not started its program yet has no mark, and shows an ordinary user nothing else.
        """
        servers = [server.process for server in self._servers if server.process.alive]
        for server in servers:
            server.stop()
        try:
            await asyncio.to_thread(self._kill_marked, frozenset(server.pid for server in servers))
        finally:
            for server in servers:
                server.kill()
            for server in servers:
                await server.wait()

    def _kill_marked(self, servers: Set[int]) -> None:
        """Kill the sandbox's processes but its stopped tool servers, and return once they have exited.

        Raises:
            SandboxError: some have not exited after `_END_S` seconds.
        """
        deadline = time.monotonic() + _END_S
        templates = {template.pid for template in self._driver.templates.values() if template.pid is not None}
        marked = _MarkedProcesses(self.id, servers, templates | set(_ancestors()))
        ended = 0
        while (found := marked.kill()) is not _Found.NOTHING:
            ended = ended + 1 if found is _Found.ENDED else 0
            if ended == _LAST_SCANS or time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_S)
        if found is _Found.MARKED:
            raise SandboxError(
                f"processes of the local sandbox {self.id} did not exit within {_END_S:g} s",
                hint=f"kill processes with {MARK}={self.id} in their environment (/proc/<pid>/environ)",
            )


def _refuse_mounts(spec: SandboxSpec) -> None:
    if spec.image is not None:
        raise UnsupportedMachine(
            f"the local driver cannot run the image {spec.image}",
            hint="use a driver that isolates; `prorl-envs doctor` says what it lacks here",
        )
    for mount in spec.mounts:
        if mount.overlay or str(mount.source) != mount.target:
            raise UnsupportedMachine(
                f"the local driver cannot mount {mount.source} at {mount.target}",
                hint="use a driver that isolates; `prorl-envs doctor` says what it lacks here",
            )


def _refuse_allowlist(spec: SandboxSpec) -> None:
    if spec.network.allow:
        raise UnsupportedMachine(
            "the local driver cannot enforce an allowlist: its programs have the host's network",
            hint="use a driver that isolates; `prorl-envs doctor` says what it lacks here",
        )


class _Found(Enum):
    """Result of a scan, or the kind of one process."""

    #: No process of the sandbox.
    NOTHING = "nothing"
    #: The process exited before it was inspected, and may have forked one that the scan did not list.
    ENDED = "ended"
    #: The process shows no environment, and may belong to the sandbox.
    UNCLEAR = "unclear"
    #: The process belongs to the sandbox. It was killed, and has not exited yet.
    MARKED = "marked"


class _MarkedProcesses:
    """Finds and kills the processes of one sandbox.

    Args:
        sandbox_id: the value of their mark.
        servers: its stopped tool servers, whose children have the mark only once they run a program.
        reapers: processes that adopt processes of the sandbox whose parents have exited.
    """

    def __init__(self, sandbox_id: str, servers: Set[int], reapers: Set[int]) -> None:
        self._mark = f"{MARK}={sandbox_id}".encode()
        self._servers = servers
        self._reapers = reapers
        #: Pid, and inode in /proc, of processes that need no second check: without the mark, or exited.
        self._others: set[tuple[int, int]] = set()

    def kill(self) -> _Found:
        """Scan the processes once, and kill those of the sandbox.

        Returns:
            The worst result of all processes.
        """
        found = {_Found.NOTHING}
        listed = set(_processes())
        self._others &= listed
        # The newest first, because processes that fork and exit at once do not live long.
        for pid, inode in sorted(listed, reverse=True):
            if (pid, inode) not in self._others:
                result = self._kill(pid)
                found.add(result)
                if result in (_Found.NOTHING, _Found.ENDED):
                    self._others.add((pid, inode))
        return next(result for result in reversed(_Found) if result in found)

    def _kill(self, pid: int) -> _Found:
        try:
            pidfd = os.pidfd_open(pid)  # so that exactly the inspected process is killed
        except (FileNotFoundError, ProcessLookupError):
            return _Found.ENDED
        try:
            found = self._classify(pid)
            if found is _Found.MARKED:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return _Found.ENDED if found is not _Found.NOTHING and has_exited(pidfd) else found
        except (FileNotFoundError, ProcessLookupError):
            return _Found.ENDED
        except PermissionError:  # the process has another user's rights
            return _Found.NOTHING
        finally:
            os.close(pidfd)

    def _classify(self, pid: int) -> _Found:
        fields = _stat(pid)
        state, parent, session, flags = fields[0], int(fields[1]), int(fields[3]), int(fields[6])
        if pid in self._servers:
            return _Found.NOTHING if state in b"TtZX" else _Found.UNCLEAR
        if parent in self._servers or session in self._servers:
            return _Found.MARKED
        environ = _environment(pid)
        if self._mark in environ.split(b"\0"):
            return _Found.MARKED
        # A process that exits, or is in the middle of `execve`, has no environment. It may get one between
        # the two reads: the bounds of the environment show whether it is empty.
        env_start, env_end = _stat(pid)[47:49]
        if environ or flags & _KERNEL_THREAD or env_start == env_end != b"0" or self._is_other(parent):
            return _Found.NOTHING
        return _Found.UNCLEAR

    def _is_other(self, parent: int) -> bool:
        """Return whether a process and its children belong to no sandbox. On a busy machine, some such
        processes always start or exit."""
        return parent not in self._reapers and any(pid == parent for pid, _ in self._others)


def _processes() -> Iterator[tuple[int, int]]:
    """Yield the pid, and the inode in /proc, of every process."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name), entry.inode()


def _ancestors() -> Iterator[int]:
    """Yield the pids of this process, its parent, and so on."""
    pid = os.getpid()
    while pid:
        yield pid
        pid = int(_stat(pid)[1])


def _stat(pid: int) -> list[bytes]:
    """Return the fields of proc_pid_stat(5), from the third (the state) on."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()


def _environment(pid: int) -> bytes:
    """Return the environment of a process; empty if it has none (an error of the kernel since 6.14)."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except ProcessLookupError:
        return b""
