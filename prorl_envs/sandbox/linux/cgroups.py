"""Control groups (version 2) for sandboxes: the kernel enforces the limits if a subtree is delegated to this
user. systemd does this for `systemd-run --user --scope -p Delegate=yes`.

Source: Documentation/admin-guide/cgroup-v2.rst in the kernel, systemd's CGROUP_DELEGATION.
"""

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxLimits
from prorl_envs.sandbox.linux.proc_lines import proc_lines

logger = logging.getLogger(__name__)

_PREFIX = "prorl-"
#: Group of the service itself: a group with subgroups may hold no process.
_SERVICE = "prorl-service"
#: File in a driver's directory that records its groups, for `sweep_groups`.
RECORD = "groups"
_CPU_PERIOD_US = 100_000
_REMOVE_S = 5.0


class Mechanism(StrEnum):
    """Enforcement mechanism for the limits of memory, processes and processors.

    WATCHDOG sets limits per process and checks the total usage of the processes. AUTO is CGROUP2 if a
    control group is delegated to this process, else WATCHDOG.
    """

    AUTO = "auto"
    CGROUP2 = "cgroup2"
    WATCHDOG = "watchdog"


class ControlGroup:
    """Control group of one sandbox.

    Args:
        folder: the group's directory.
        controllers: names of the controllers that the group has.
    """

    def __init__(self, folder: Path, controllers: Collection[str]) -> None:
        self.folder = folder
        self._controllers = controllers

    def make(self, limits: SandboxLimits, nice: int) -> None:
        """Create the group with its limits.

        Args:
            nice: the group's weight among other groups is that of a process with this nice value.

        Raises:
            SandboxError: the kernel refused.
        """
        try:
            self.folder.mkdir()
            for name, value in settings(limits, nice).items():
                if name.partition(".")[0] in self._controllers:
                    (self.folder / name).write_text(value)
            swap = self.folder / "memory.swap.max"  # absent if the kernel does not count swap
            if limits.memory_bytes is not None and swap.exists():
                swap.write_text("0")
        except OSError as error:
            self.remove(patience_s=0)
            raise SandboxError(f"cannot make a sandbox's control group: {error}") from error

    def add(self, pid: int) -> None:
        """Add a process; processes that it starts later are in the group as well.

        Raises:
            OSError: the process has exited, or the kernel refused.
        """
        (self.folder / "cgroup.procs").write_text(str(pid))

    def killed(self) -> int:
        """Return how many processes the kernel has killed for their memory. Takes some microseconds."""
        return _numbers(self.folder, "memory.events").get("oom_kill", 0)

    def remove(self, *, patience_s: float = _REMOVE_S) -> None:
        """Kill the remaining processes and remove the group. Blocks. Missing is fine; a failure is logged."""
        _remove(self.folder, patience_s)


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """Parent group in which a driver creates the groups of its sandboxes.

    Args:
        place: the parent's directory.
        controllers: names of the controllers that its subgroups have.
    """

    place: Path
    controllers: tuple[str, ...]

    def group(self, sandbox_id: str) -> ControlGroup:
        """Return the group of a sandbox, not created yet."""
        return ControlGroup(self.place / f"{_PREFIX}{sandbox_id}", self.controllers)

    def record(self, directory: Path, driver_id: str) -> None:
        """Record the parent group in the driver's directory, for `sweep_groups`."""
        (directory / RECORD).write_text(json.dumps({"driver": driver_id, "place": str(self.place)}))


def settings(limits: SandboxLimits, nice: int) -> dict[str, str]:
    """Return the value of each file that sets a limit, or the weight. Pure."""
    values = {"cpu.weight.nice": str(nice)}
    if limits.memory_bytes is not None:
        values["memory.max"] = str(limits.memory_bytes)
    if limits.processes is not None:
        values["pids.max"] = str(limits.processes)
    if limits.cpus is not None:
        values["cpu.max"] = f"{max(1000, round(limits.cpus * _CPU_PERIOD_US))} {_CPU_PERIOD_US}"
    return values


def find_groups(mechanism: Mechanism, proc: Path = Path("/proc")) -> ControlGroups | None:
    """Return the parent group for sandboxes; None if the watchdog must enforce the limits.

    This process moves into a group of its own beside those of the sandboxes.

    Args:
        mechanism: the requested mechanism.
        proc: directory in which the kernel lists mounts and groups.

    Raises:
        SandboxError: groups were requested by name, and are not available.
    """
    if mechanism is Mechanism.WATCHDOG:
        return None
    place, problem = delegated(proc)
    if place is not None:
        controllers, problem = _occupy(place)
        if not problem:
            return ControlGroups(place, controllers)
    if mechanism is Mechanism.CGROUP2:
        raise SandboxError(
            f"no control groups of version 2: {problem}",
            hint="start the service with `systemd-run --user --scope -p Delegate=yes`, "
            "or set limits.enforcement to watchdog",
        )
    return None


def delegated(proc: Path = Path("/proc")) -> tuple[Path | None, str]:
    """Return the group of this process if its subtree is delegated to this user; else None and the reason."""
    mount = _mount_point(proc)
    if mount is None:
        return None, "no hierarchy is mounted"
    place = mount / _memberships(proc).get("", "/").lstrip("/")
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

    If so, a nice value has no effect on other sessions. Groups with a weight are exempt.
    """
    switch = proc / "sys/kernel/sched_autogroup_enabled"
    if not switch.exists() or switch.read_text().strip() != "1":
        return False
    memberships = _memberships(proc)
    if "cpu" in memberships:
        return memberships["cpu"] == "/"
    mount = _mount_point(proc)
    return mount is None or not (mount / memberships.get("", "/").lstrip("/") / "cpu.weight").exists()


def _is_marked(place: Path) -> bool:
    """Return whether systemd marks the group as delegated. Root can write to every group."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(place, name) == b"1":
                return True
    return False


def _occupy(place: Path) -> tuple[tuple[str, ...], str]:
    """Move this process out of `place` and enable the controllers for its subgroups.

    Returns:
        The controllers, and the obstacle, empty if there is none.
    """
    service = place / _SERVICE
    try:
        service.mkdir(exist_ok=True)
        others = {int(line) for line in (place / "cgroup.procs").read_text().split()} - {os.getpid()}
        if not all(_is_descendant(pid) for pid in others):
            return (), f"other processes run in {place}"
        for pid in (os.getpid(), *others):
            with contextlib.suppress(ProcessLookupError):
                (service / "cgroup.procs").write_text(str(pid))
        present = (place / "cgroup.controllers").read_text().split()
        wanted = tuple(name for name in ("memory", "pids", "cpu") if name in present)
        (place / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))
    except OSError as error:
        return (), f"{place}: {error.strerror}"
    return wanted, ""


def _is_descendant(pid: int) -> bool:
    with contextlib.suppress(OSError):
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        return False
    return True  # it has exited


def _mount_point(proc: Path) -> Path | None:
    """Return where the whole hierarchy of version 2 is mounted; None if it is not."""
    for line in proc_lines(proc / "self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if after.startswith("cgroup2 ") and fields[3] == "/":
            return Path(fields[4])
    return None


def _memberships(proc: Path) -> dict[str, str]:
    """Return the path of this process's group in each hierarchy, by controller (version 2: "")."""
    found = {}
    for line in proc_lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def sweep_groups(directory: Path) -> None:
    """Remove the groups of a killed driver whose directory the caller has found abandoned.

    Args:
        directory: the driver's directory; no sandbox can write the record in it.
    """
    try:
        record = json.loads((directory / RECORD).read_bytes())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        logger.warning("cannot read the record of a killed service's control groups: %s", error)
        return
    for folder in Path(record["place"]).glob(f"{_PREFIX}{record['driver']}-*"):
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
