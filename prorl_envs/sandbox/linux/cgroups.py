"""Control groups for sandboxes: the kernel itself enforces the limits if this user may create groups.

Version 2 is used if a subtree is delegated to this user (systemd does this for `systemd-run --user --scope -p
Delegate=yes`), version 1 only on request, because its hierarchies have no delegation that systemd respects.
Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ in the kernel, systemd's CGROUP_DELEGATION.
"""

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxLimits

logger = logging.getLogger(__name__)

_PREFIX = "prorl-"
#: Group of the service itself: a group with subgroups may hold no process.
_SERVICE = "prorl-service"
#: File in a driver's directory that records its groups, for `sweep_groups`.
RECORD = "groups"
_CPU_PERIOD_US = 100_000
#: Weight of a group in version 1, and the factor by which each step of `nice` lowers it: sched(7).
_CPU_SHARES, _LESS_PER_NICE = 1024, 1.25
_REMOVE_S = 5.0


class Mechanism(StrEnum):
    """Enforcement mechanism for the limits of memory, processes and processors.

    AUTO: CGROUP2 if it is delegated, else WATCHDOG. CGROUP1: groups of version 1, as root. WATCHDOG: limits
    per process, and checks of their total usage.
    """

    AUTO = "auto"
    CGROUP2 = "cgroup2"
    CGROUP1 = "cgroup1"
    WATCHDOG = "watchdog"


class ControlGroup:
    """Control group of one sandbox: a folder, or one per controller in version 1.

    Args:
        folders: by controller; in version 2 all are the same.
        unified: whether this is version 2.
    """

    def __init__(self, folders: Mapping[str, Path], *, unified: bool) -> None:
        self._folders = folders
        self._unified = unified

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders of the group, to each of which a process must be added."""
        return tuple(dict.fromkeys(map(str, self._folders.values())))

    def make(self, limits: SandboxLimits, nice: int) -> None:
        """Create the group with its limits.

        Args:
            nice: the group's weight among other groups is that of a process with this nice value.

        Raises:
            SandboxError: the kernel refused.
        """
        try:
            for folder in self.folders:
                Path(folder).mkdir()
            for controller, name, value in settings(limits, nice, unified=self._unified):
                if controller in self._folders:
                    (self._folders[controller] / name).write_text(value)
            self._bound_swap(limits)
        except OSError as error:
            self.remove(patience_s=0)
            raise SandboxError(f"cannot make a sandbox's control group: {error}") from error

    def add(self, pid: int) -> None:
        """Add a process; processes that it starts later are in the group as well.

        Raises:
            OSError: the process has exited, or the kernel refused.
        """
        for folder in self.folders:
            Path(folder, "cgroup.procs").write_text(str(pid))

    def killed(self) -> int:
        """Return how many processes the kernel has killed for their memory. Takes some microseconds."""
        name = "memory.events" if self._unified else "memory.oom_control"
        return _numbers(self._folders["memory"], name).get("oom_kill", 0)

    def remove(self, *, patience_s: float = _REMOVE_S) -> None:
        """Kill the remaining processes and remove the group. Blocks. Missing is fine; a failure is logged."""
        for folder in map(Path, self.folders):
            _remove(folder, patience_s)

    def _bound_swap(self, limits: SandboxLimits) -> None:
        # Absent if the kernel does not count swap; version 1 counts memory and swap together.
        name = "memory.swap.max" if self._unified else "memory.memsw.limit_in_bytes"
        path = self._folders["memory"] / name
        if limits.memory_bytes is not None and path.exists():
            path.write_text("0" if self._unified else str(limits.memory_bytes))


class ControlGroups:
    """Parent groups in which a driver creates the groups of its sandboxes.

    Args:
        places: for each controller, the parent folder.
        unified: whether this is version 2.
    """

    def __init__(self, places: Mapping[str, Path], *, unified: bool) -> None:
        self.places = places
        self.unified = unified

    @property
    def mechanism(self) -> Mechanism:
        return Mechanism.CGROUP2 if self.unified else Mechanism.CGROUP1

    def group(self, sandbox_id: str) -> ControlGroup:
        """Return the group of a sandbox, not created yet."""
        folders = {name: place / f"{_PREFIX}{sandbox_id}" for name, place in self.places.items()}
        return ControlGroup(folders, unified=self.unified)

    def record(self, directory: Path, driver_id: str) -> None:
        """Record the parent folders in the driver's directory, for `sweep_groups`."""
        places = list(dict.fromkeys(map(str, self.places.values())))
        (directory / RECORD).write_text(json.dumps({"driver": driver_id, "places": places}))


def settings(limits: SandboxLimits, nice: int, *, unified: bool) -> Iterator[tuple[str, str, str]]:
    """Yield the controller, file and value of each limit, and of the weight. Pure."""
    if unified:
        yield "cpu", "cpu.weight.nice", str(nice)
    else:
        yield "cpu", "cpu.shares", str(round(_CPU_SHARES / _LESS_PER_NICE**nice))
    if limits.memory_bytes is not None:
        yield "memory", "memory.max" if unified else "memory.limit_in_bytes", str(limits.memory_bytes)
    if limits.processes is not None:
        yield "pids", "pids.max", str(limits.processes)
    if limits.cpus is not None:
        quota = max(1000, round(limits.cpus * _CPU_PERIOD_US))
        if unified:
            yield "cpu", "cpu.max", f"{quota} {_CPU_PERIOD_US}"
        else:
            yield "cpu", "cpu.cfs_period_us", str(_CPU_PERIOD_US)
            yield "cpu", "cpu.cfs_quota_us", str(quota)


def find_groups(mechanism: Mechanism, proc: Path = Path("/proc")) -> ControlGroups | None:
    """Return the groups that this process may divide; None if the watchdog must enforce the limits.

    In version 2 this process moves to a group of its own beside those of the sandboxes.

    Args:
        mechanism: the requested mechanism.
        proc: directory in which the kernel lists mounts and groups.

    Raises:
        SandboxError: groups were requested by name, and are not available.
    """
    if mechanism is Mechanism.WATCHDOG:
        return None
    if mechanism is Mechanism.CGROUP1:
        return _find_legacy(proc)
    place, problem = delegated(proc)
    if place is not None:
        controllers, problem = _occupy(place)
        if not problem:
            return ControlGroups(dict.fromkeys(controllers, place), unified=True)
    if mechanism is Mechanism.CGROUP2:
        raise SandboxError(
            f"no control groups of version 2: {problem}",
            hint="start the service with `systemd-run --user --scope -p Delegate=yes`, "
            "or set limits.mechanism to watchdog",
        )
    return None


def delegated(proc: Path = Path("/proc")) -> tuple[Path | None, str]:
    """Return the group of this process if its subtree is delegated to this user; else None and the reason."""
    mount = next((at for at, kind, _ in _mounts(proc) if kind == "cgroup2"), None)
    if mount is None:
        return None, "no hierarchy is mounted"
    own = _memberships(proc).get("", "/")
    place = mount / own.lstrip("/")
    if place.name == _SERVICE:  # another driver of this process has moved it
        place = place.parent
    try:
        present = (place / "cgroup.controllers").read_text().split()
    except OSError as error:
        return None, f"{place} cannot be read: {error.strerror}"
    if missing := {"memory", "pids"} - set(present):
        return None, f"{place} has no controller {', '.join(sorted(missing))}"
    if not all(os.access(place / name, os.W_OK) for name in ("", "cgroup.procs", "cgroup.subtree_control")):
        return None, f"{place} is not delegated to this user"
    if os.geteuid() == 0 and Path("/run/systemd/system").is_dir() and not _is_marked(place):
        return None, f"{place} belongs to systemd"
    return place, ""


def sessions_weigh_alike(proc: Path = Path("/proc")) -> bool:
    """Return whether the kernel divides CPU time by session (sched_autogroup): see sched(7).

    If so, a nice value has no effect on other sessions. The kernel does not do so in a group that has a
    weight.
    """
    switch = proc / "sys/kernel/sched_autogroup_enabled"
    if not switch.exists() or switch.read_text().strip() != "1":
        return False
    memberships = _memberships(proc)
    if "cpu" in memberships:
        return memberships["cpu"] == "/"
    mount = next((at for at, kind, _ in _mounts(proc) if kind == "cgroup2"), None)
    return mount is None or not (mount / memberships.get("", "/").lstrip("/") / "cpu.weight").exists()


def _is_marked(place: Path) -> bool:
    """Return whether systemd marks the group as delegated. To root, every group looks writable."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(place, name) == b"1":
                return True
    return False


def _occupy(place: Path) -> tuple[list[str], str]:
    """Move this process out of `place` and enable the controllers for its subgroups.

    Returns:
        The controllers, and the obstacle, empty if there is none.
    """
    service = place / _SERVICE
    try:
        service.mkdir(exist_ok=True)
        others = {int(line) for line in (place / "cgroup.procs").read_text().split()} - {os.getpid()}
        if not all(_is_descendant(pid) for pid in others):
            return [], f"other processes run in {place}"
        for pid in (os.getpid(), *others):
            with contextlib.suppress(ProcessLookupError):
                (service / "cgroup.procs").write_text(str(pid))
        present = (place / "cgroup.controllers").read_text().split()
        wanted: list[str] = [name for name in ("memory", "pids", "cpu") if name in present]
        (place / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))
    except OSError as error:
        return [], f"{place}: {error.strerror}"
    return wanted, ""


def _is_descendant(pid: int) -> bool:
    with contextlib.suppress(OSError):
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        return False
    return True  # it has exited


def _find_legacy(proc: Path) -> ControlGroups:
    """Return the groups of version 1 that this process is in."""
    memberships = _memberships(proc)
    places = {}
    for mount, kind, options in _mounts(proc):
        for name in {"memory", "pids", "cpu"} & set(options.split(",")):
            if kind == "cgroup" and name in memberships:
                places[name] = mount / memberships[name].lstrip("/")
    missing = {"memory", "pids"} - {name for name, place in places.items() if os.access(place, os.W_OK)}
    if missing:
        raise SandboxError(
            f"no control groups of version 1: {', '.join(sorted(missing))} cannot be divided by this user",
            hint="set limits.mechanism to auto",
        )
    return ControlGroups(places, unified=False)


def _mounts(proc: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the path, kind and own options of every mount of a whole hierarchy."""
    for line in (proc / "self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        kind, _, options = after.split(" ", 2)
        if kind.startswith("cgroup") and fields[3] == "/":
            yield Path(fields[4]), kind, options


def _memberships(proc: Path) -> dict[str, str]:
    """Return the path of this process's group in each hierarchy, by controller (version 2: "")."""
    found = {}
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def sweep_groups(directory: Path) -> None:
    """Remove the groups of a killed driver whose directory the caller has found abandoned.

    Args:
        directory: the driver's; no sandbox can write the record in it.
    """
    try:
        record = json.loads((directory / RECORD).read_bytes())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        logger.warning("cannot read where a killed service had its control groups: %s", error)
        return
    for place in map(Path, record["places"]):
        for folder in place.glob(f"{_PREFIX}{record['driver']}-*"):
            _remove(folder, _REMOVE_S)


def _remove(folder: Path, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                logger.warning("cannot remove the control group %s: %s", folder, error.strerror)
                return
            _kill_all(folder)
            time.sleep(0.01)  # killed processes take time to exit, and no event reports an empty group
        else:
            return


def _kill_all(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for line in (folder / "cgroup.procs").read_text().split():
            if int(line) > 0:  # 0 is a process outside this pid namespace
                pidfd = os.pidfd_open(int(line))
                try:
                    if str(int(line)) in (folder / "cgroup.procs").read_text().split():
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                finally:
                    os.close(pidfd)


def _numbers(folder: Path, name: str) -> dict[str, int]:
    try:
        lines = (folder / name).read_text().splitlines()
    except OSError:  # the group is gone
        return {}
    return {key: int(value) for key, value in (line.split() for line in lines)}
