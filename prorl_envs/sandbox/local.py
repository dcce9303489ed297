"""A driver without isolation, for trusted use on machines that allow no user namespaces.

Same contract, same tool server, no walls: what runs in it is this user on this machine.
"""

import asyncio
import contextlib
import os
import signal
import socket
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.command import DEFAULT_ENV
from prorl_envs.sandbox.containment import DEFAULT_LIMITS, NodeLimits
from prorl_envs.sandbox.driver import NodeDriver, NodeSandbox
from prorl_envs.sandbox.route import listen_on_host
from prorl_envs.sandbox.template import TEMPLATES, TemplateSpec
from prorl_envs.sandbox.template_process import ForkRequest

#: Marks every process of a sandbox, for there is no pid namespace to end them by.
MARK = "PRORL_LOCAL_SANDBOX"
_KERNEL_THREAD = 0x0020_0000


class NoIsolationWarning(UserWarning):
    """Commands run unconfined on this machine."""


class LocalDriver(NodeDriver["LocalSandbox"]):
    """Runs "sandboxes" as plain directories. Isolates nothing, and warns that it does.

    Args:
        root: see `NodeDriver`.
        templates: see `NodeDriver`.
        limits: likewise; kept are only those of single processes, of the disk and of wall time.

    Raises:
        SandboxError: no directory can be made.
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
    def kept(self) -> frozenset[str]:
        """What has to be told from this user's other processes is not."""
        return super().kept - {"cpus", "memory_bytes", "processes"}

    async def _make(self, spec: SandboxSpec) -> "LocalSandbox":
        _refuse_mounts(spec)
        _refuse_allowlist(spec)
        sandbox_id, root = self._place()
        return LocalSandbox(sandbox_id, spec, root, self)


class LocalSandbox(NodeSandbox):
    """A directory and the processes started in it.

    The path `spec.workdir` does not exist: processes start in the workspace directory itself.
    """

    _own_users = False

    async def launch(self) -> None:
        """Make the directories; there is no first process."""
        if not self._restored:
            self._root.mkdir(mode=0o700)
            for name in self._state():
                (self._root / name).mkdir(mode=0o700)

    def _open_place(self) -> int:
        return os.open(self.workspace, os.O_PATH | os.O_DIRECTORY)

    def _request(self, entry: str) -> ForkRequest:
        own = {"HOME": str(self._root / "home"), "TMPDIR": str(self._root / "tmp"), MARK: self.id}
        env = {**DEFAULT_ENV, **own, **self._spec.env}
        return ForkRequest(entry=entry, workdir=str(self.workspace), env=env, isolated=False)

    async def listen(self) -> socket.socket:
        """See `Sandbox.listen`. The loopback is the host's, so others can connect too: it warns of that."""
        if not self.alive:
            raise self.ended()
        warnings.warn(
            "a service for a local sandbox listens on this machine's own loopback: everybody on it can "
            "connect, and nothing but the service's key keeps them out",
            NoIsolationWarning,
            stacklevel=2,
        )
        return listen_on_host()

    async def _end(self) -> None:
        """Kill what carries this sandbox's mark."""
        for server in self._servers:
            server.process.kill()
        for server in self._servers:
            await server.process.wait()
        await asyncio.to_thread(self._kill_marked)

    def _kill_marked(self) -> None:
        """Kill until a look around finds none: what is killed may have just forked, and what begins another
        program shows no environment for a moment.
        """
        while sum(_kill(pid, self.id) for pid in _own_processes()):
            pass


def _refuse_mounts(spec: SandboxSpec) -> None:
    if spec.image is not None:
        raise SandboxError(
            f"the local driver cannot run the image {spec.image}",
            hint="use a driver that isolates; `prorl-envs doctor` says what it lacks here",
        )
    for mount in spec.mounts:
        if mount.overlay or str(mount.source) != mount.target:
            raise SandboxError(
                f"the local driver cannot mount {mount.source} at {mount.target}",
                hint="use a driver that isolates; `prorl-envs doctor` says what it lacks here",
            )


def _refuse_allowlist(spec: SandboxSpec) -> None:
    if spec.network.allow:
        raise SandboxError(
            "the local driver cannot keep an allowlist: what runs in it has the host's network",
            hint="use a driver that isolates; `prorl-envs doctor` says what it lacks here",
        )


def _own_processes() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_uid == os.geteuid():
                    yield int(entry.name)


def _kill(pid: int, sandbox_id: str) -> bool:
    """Kill `pid` if it carries the mark. Held by pidfd, so that it is the process that was looked at.

    Returns:
        Whether it was killed, or has to be looked at again.
    """
    with contextlib.suppress(ProcessLookupError, FileNotFoundError, PermissionError):
        pidfd = os.pidfd_open(pid)
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            if f"{MARK}={sandbox_id}".encode() in environ.split(b"\0"):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return True
            return not environ and _begins(pid)
        finally:
            os.close(pidfd)
    return False


def _begins(pid: int) -> bool:
    """Whether a process is in the middle of `execve`, where the kernel knows of no environment yet.

    See proc_pid_stat(5) for the fields: the state, the kernel's flags, the end of the environment.
    """
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    return fields[0] not in (b"Z", b"X") and not int(fields[6]) & _KERNEL_THREAD and int(fields[48]) == 0
