"""Enforcement of a driver's limits: chooses between control groups and the watchdog, and sets up each
sandbox for either."""

import asyncio
import contextlib
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from prorl_envs.sandbox.base import SandboxLimits, SandboxSpec
from prorl_envs.sandbox.filesystem.directories import DriverDirectory
from prorl_envs.sandbox.limits.kernel_counters import full_counter_errno
from prorl_envs.sandbox.limits.monitor import MonitoredSandbox, SandboxMonitor
from prorl_envs.sandbox.limits.watchdog import Watchdog
from prorl_envs.sandbox.linux.cgroups import ControlGroup, ControlGroups, Mechanism, find_groups
from prorl_envs.sandbox.linux.descriptors import SOFT_OPEN_FILES, open_files_inside
from prorl_envs.sandbox.template.process import ForkRequest

#: Limit of processes if the kernel counts those of a sandbox together with all others of the user.
_PROCESSES_OF_USER = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """The limits of a machine's sandboxes.

    Args:
        per_sandbox: limits of a sandbox whose spec has none.
        reserve_bytes: disk space to keep free: if less is free, the largest sandbox is killed. 0 disables it.
        enforcement: how limits are enforced.
        nice: nice value of sandboxes, from 0 to 19.
    """

    per_sandbox: SandboxLimits = field(default_factory=SandboxLimits)
    reserve_bytes: int = 1 << 30
    enforcement: Mechanism = Mechanism.AUTO
    nice: int = 10

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Convert the values of `config.LimitSettings`."""
        of_machine = {"reserve_bytes", "enforcement", "nice"}
        per_sandbox = SandboxLimits(
            **{name: value for name, value in settings.items() if name not in of_machine}
        )
        return cls(
            per_sandbox=per_sandbox,
            reserve_bytes=settings["reserve_bytes"],
            enforcement=Mechanism(settings["enforcement"]),
            nice=settings["nice"],
        )


DEFAULT_LIMITS = NodeLimits()


class LimitedSandbox(MonitoredSandbox, Protocol):
    """The part of a sandbox that limit enforcement uses."""

    enforced: "EnforcedLimits"

    @property
    def spec(self) -> SandboxSpec: ...


@dataclass(slots=True)
class EnforcedLimits:
    """Enforced limits of one sandbox.

    Args:
        limits: its limits.
        group: its control group, if control groups are used.
        watch: its watchdog state, once the sandbox runs.
    """

    limits: SandboxLimits | None = None
    group: ControlGroup | None = None
    watch: SandboxMonitor | None = None

    def apply(self, request: ForkRequest) -> ForkRequest:
        """Add the sandbox's limits to the fork request of a tool server."""
        if self.limits is None:
            return request
        groups = () if self.group is None else (str(self.group.folder),)
        return replace(request, groups=groups, rlimits=rlimits(self.limits, isolated=request.isolated))

    def bound_open_files(self, pid: int) -> None:
        """Lower the open-files limit of a process that another program started for the sandbox."""
        if self.limits is not None:
            hard = open_files_inside(self.limits.open_files)
            with contextlib.suppress(ProcessLookupError):  # it exited at once, and its output has the reason
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(SOFT_OPEN_FILES, hard), hard))

    def pop_notices(self) -> list[str]:
        return [] if self.watch is None else self.watch.take()

    async def release(self) -> None:
        """Remove the control group after all its processes have exited."""
        if self.group is not None:
            await asyncio.to_thread(self.group.remove)


class LimitEnforcer:
    """Limit enforcement of one driver. The mechanism is detected when the first sandbox starts.

    Args:
        limits: limits of the machine's sandboxes.
        directory: the driver's directory.
    """

    def __init__(self, limits: NodeLimits, directory: DriverDirectory) -> None:
        self._limits = limits
        self._directory = directory
        self._watchdog = Watchdog(directory.path, limits.reserve_bytes)
        self._groups: ControlGroups | None = None
        self._detected = False

    @property
    def enforces_cpu_limit(self) -> bool:
        """True if a limit of processor time is enforced.

        Raises:
            SandboxError: the requested mechanism is not available.
        """
        groups = self._detect()
        return groups is not None and "cpu" in groups.controllers

    def complete(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with default limits if it has none."""
        return spec if spec.limits is not None else replace(spec, limits=self._limits.per_sandbox)

    async def prepare(self, sandbox: LimitedSandbox) -> None:
        """Set up enforcement before a sandbox's launch.

        Raises:
            SandboxError: no control group can be made for it, or limits are no longer enforced.
        """
        self._watchdog.check()
        limits = sandbox.spec.limits
        assert limits is not None
        sandbox.enforced.limits = limits
        groups = self._detect()
        if groups is not None:
            group = groups.group(sandbox.id)
            sandbox.enforced.group = group
            await asyncio.to_thread(group.make, limits, self._limits.nice)

    def watch(self, sandbox: LimitedSandbox) -> None:
        """Start enforcement after a sandbox's launch, before any command runs in it."""
        enforced = sandbox.enforced
        assert enforced.limits is not None
        if enforced.group is not None and sandbox.first_pid is not None:
            enforced.group.add(sandbox.first_pid)
        enforced.watch = self._watchdog.add(sandbox, enforced.limits, enforced.group)

    async def relieve(self, error: BaseException) -> MonitoredSandbox | None:
        """Kill the sandbox that holds the most, if `error` comes from a full counter that sandboxes share.

        Returns:
            The killed sandbox, which is about to close; None if none was killed.
        """
        refused = full_counter_errno(error)
        return None if refused is None else await self._watchdog.relieve(refused)

    def forget(self, sandbox: LimitedSandbox) -> None:
        """Stop watching a sandbox that has closed."""
        self._watchdog.remove(sandbox)
        sandbox.enforced.watch = None  # breaks a reference cycle that the collector would have to find

    async def aclose(self) -> None:
        """Stop the watchdog, once all sandboxes are closed. Idempotent."""
        await self._watchdog.aclose()

    def _detect(self) -> ControlGroups | None:
        if not self._detected:
            self._groups = find_groups(self._limits.enforcement)
            if self._groups is not None:
                self._groups.record(self._directory.path, self._directory.id)
            self._detected = True
        return self._groups


def rlimits(limits: SandboxLimits, *, isolated: bool) -> tuple[tuple[int, int, int], ...]:
    """Return the limits that the kernel enforces for each process: kind, soft and hard bound.

    The address space is not limited: many processes reserve memory that they never use.
    """
    open_files = open_files_inside(limits.open_files)
    found = [
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, min(SOFT_OPEN_FILES, open_files), open_files),
    ]
    # The kernel counts processes per user namespace (so per sandbox); before Linux 5.14, per user. Root is
    # exempt.
    processes = limits.processes if isolated else _PROCESSES_OF_USER
    if processes is not None:
        found.append((resource.RLIMIT_NPROC, processes, processes))
    file_bytes = limits.file_bytes if limits.file_bytes is not None else limits.disk_bytes
    if file_bytes is not None:
        found.append((resource.RLIMIT_FSIZE, file_bytes, file_bytes))
    return tuple(found)
