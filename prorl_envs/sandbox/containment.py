"""How a driver keeps its sandboxes' limits: chooses between control groups and the watchdog, and gives each
sandbox what it needs of either."""

import asyncio
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from prorl_envs.sandbox.base import Limits, SandboxSpec
from prorl_envs.sandbox.cgroups import Group, Groups, Mechanism, find_groups
from prorl_envs.sandbox.files import DriverDirectory
from prorl_envs.sandbox.template_process import ForkRequest
from prorl_envs.sandbox.watch import Watch, Watched
from prorl_envs.sandbox.watchdog import Watchdog

_SOFT_OPEN_FILES = 4096
#: Where processes cannot be told from the user's others, as many as a user needs.
_PROCESSES_OF_USER = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """The limits of a machine's sandboxes.

    Args:
        each: of a sandbox whose spec names none.
        reserve_bytes: of the disk, kept free: below it the sandbox that holds most is ended. 0 keeps nothing.
        mechanism: what keeps them.
        nice: by how much sandboxes yield the processors to others, as `nice` counts: from 0 to 19.
    """

    each: Limits = field(default_factory=Limits)
    reserve_bytes: int = 1 << 30
    mechanism: Mechanism = Mechanism.AUTO
    nice: int = 10

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """From the values of `config.LimitSettings`."""
        own = {"reserve_bytes", "mechanism", "nice"}
        each = Limits(**{name: value for name, value in settings.items() if name not in own})
        return cls(
            each=each,
            reserve_bytes=settings["reserve_bytes"],
            mechanism=Mechanism(settings["mechanism"]),
            nice=settings["nice"],
        )


DEFAULT_LIMITS = NodeLimits()


class Containable(Watched, Protocol):
    """What containment needs of a sandbox."""

    contained: "Contained"

    @property
    def spec(self) -> SandboxSpec: ...


@dataclass(slots=True)
class Contained:
    """What keeps one sandbox's limits.

    Args:
        limits: its.
        group: its control group, where there are any.
        watch: what the watchdog knows of it, once it runs.
    """

    limits: Limits | None = None
    group: Group | None = None
    watch: Watch | None = None

    def apply(self, request: ForkRequest) -> ForkRequest:
        """The request for a tool server, with its limits."""
        if self.limits is None:
            return request
        groups = () if self.group is None else self.group.folders
        return replace(request, groups=groups, rlimits=rlimits(self.limits, isolated=request.isolated))

    def enter(self, pid: int) -> None:
        """Have the process, which has done nothing yet, and all it starts in the sandbox's control groups."""
        if self.group is not None:
            self.group.add(pid)

    def take_notices(self) -> list[str]:
        return [] if self.watch is None else self.watch.take()

    async def release(self) -> None:
        """Remove the control group, once everything in it has ended."""
        if self.group is not None:
            await asyncio.to_thread(self.group.remove)


class Containment:
    """That of one driver. What keeps the limits is found out at the first sandbox.

    Args:
        limits: the machine's.
        directory: the driver's.

    Raises:
        SandboxError: the mechanism asked for cannot be had.
    """

    def __init__(self, limits: NodeLimits, directory: DriverDirectory) -> None:
        self._limits = limits
        self._directory = directory
        self._watchdog = Watchdog(directory.path, limits.reserve_bytes)
        self._groups: Groups | None = None
        self._found = False

    @property
    def mechanism(self) -> Mechanism:
        """What keeps the limits of memory, processes and processors.

        Raises:
            SandboxError: the one asked for cannot be had.
        """
        groups = self._find()
        return Mechanism.WATCHDOG if groups is None else groups.mechanism

    @property
    def keeps_cpus(self) -> bool:
        """Whether a limit of processor time is kept.

        Raises:
            SandboxError: the mechanism asked for cannot be had.
        """
        groups = self._find()
        return groups is not None and "cpu" in groups.places

    @property
    def looking_s(self) -> float:
        """Seconds the watchdog has spent looking at processes; for operators."""
        return self._watchdog.looking_s

    def complete(self, spec: SandboxSpec) -> SandboxSpec:
        """The spec with limits."""
        return spec if spec.limits is not None else replace(spec, limits=self._limits.each)

    async def prepare(self, sandbox: Containable) -> None:
        """Before its launch.

        Raises:
            SandboxError: there is no control group to be had for it, or limits are no longer kept.
        """
        self._watchdog.check()
        limits = sandbox.spec.limits
        assert limits is not None
        sandbox.contained.limits = limits
        groups = self._find()
        if groups is not None:
            group = groups.group(sandbox.id)
            sandbox.contained.group = group
            await asyncio.to_thread(group.make, limits, self._limits.nice)

    def watch(self, sandbox: Containable) -> None:
        """After its launch, before anything is told to run in it."""
        contained = sandbox.contained
        assert contained.limits is not None
        if contained.group is not None and sandbox.first_pid is not None:
            contained.group.add(sandbox.first_pid)
        contained.watch = self._watchdog.add(sandbox, contained.limits, contained.group)

    def forget(self, sandbox: Containable) -> None:
        """It has closed."""
        self._watchdog.remove(sandbox)
        sandbox.contained.watch = None  # else each would hold the other, until the collector finds them

    async def aclose(self) -> None:
        """Once all sandboxes are closed. Idempotent."""
        await self._watchdog.aclose()

    def _find(self) -> Groups | None:
        if not self._found:
            self._groups = find_groups(self._limits.mechanism)
            if self._groups is not None:
                self._groups.record(self._directory.path, self._directory.id)
            self._found = True
        return self._groups


def rlimits(limits: Limits, *, isolated: bool) -> tuple[tuple[int, int, int], ...]:
    """What the kernel bounds for each process by itself: kind, soft and hard bound. Pure.

    Not the address space: a process may reserve what it never uses, and many do.
    """
    found = [
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, min(_SOFT_OPEN_FILES, limits.open_files), limits.open_files),
    ]
    # Counted per user namespace since Linux 5.14, so per sandbox; before that, per user. Root is exempt.
    processes = limits.processes if isolated else _PROCESSES_OF_USER
    if processes is not None:
        found.append((resource.RLIMIT_NPROC, processes, processes))
    file_bytes = limits.file_bytes if limits.file_bytes is not None else limits.disk_bytes
    if file_bytes is not None:
        found.append((resource.RLIMIT_FSIZE, file_bytes, file_bytes))
    return tuple(found)
