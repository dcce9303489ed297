"""Control groups for sandboxes: where this user may make them, the kernel itself keeps the limits.

Version 2 is used where a subtree is delegated to this user (systemd does it for `systemd-run --user --scope
-p Delegate=yes`), version 1 only on request, for its hierarchies have no delegation that systemd respects.
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
from prorl_envs.sandbox.base import Limits

logger = logging.getLogger(__name__)

_PREFIX = "prorl-"
#: The service itself, for a group with groups below it may hold no process.
_SERVICE = "prorl-service"
#: In a driver's directory: where its groups are, for whoever sweeps after it.
RECORD = "groups"
_CPU_PERIOD_US = 100_000
#: Of a group in version 1, and how much less each step of `nice` is to the kernel's scheduler: sched(7).
_CPU_SHARES, _LESS_PER_NICE = 1024, 1.25
_REMOVE_S = 5.0


class Mechanism(StrEnum):
    """What keeps the limits of memory, processes and processors.

    AUTO: CGROUP2 where it is delegated, else WATCHDOG. CGROUP1: groups of version 1, as root. WATCHDOG: the
    limits of single processes, and looks at what they use together.
    """

    AUTO = "auto"
    CGROUP2 = "cgroup2"
    CGROUP1 = "cgroup1"
    WATCHDOG = "watchdog"


class Group:
    """The control group of one sandbox: a folder, or one for each controller in version 1.

    Args:
        folders: by controller; in version 2 all are the same.
        unified: whether this is version 2.
    """

    def __init__(self, folders: Mapping[str, Path], *, unified: bool) -> None:
        self._folders = folders
        self._unified = unified

    @property
    def folders(self) -> tuple[str, ...]:
        """Where a process has to be entered."""
        return tuple(dict.fromkeys(map(str, self._folders.values())))

    def make(self, limits: Limits, nice: int) -> None:
        """Make it, with its limits.

        Args:
            nice: its weight among other groups is that of a process which is that nice.

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
        """Enter a process; what it starts from now on is in the group as well.

        Raises:
            OSError: it has ended, or the kernel refused.
        """
        for folder in self.folders:
            Path(folder, "cgroup.procs").write_text(str(pid))

    def killed(self) -> int:
        """How many processes the kernel killed so far, for their memory. Costs some microseconds."""
        name = "memory.events" if self._unified else "memory.oom_control"
        return _numbers(self._folders["memory"], name).get("oom_kill", 0)

    def remove(self, *, patience_s: float = _REMOVE_S) -> None:
        """Kill what is left in it and remove it. Blocks. Missing is fine; what stays is logged."""
        for folder in map(Path, self.folders):
            _remove(folder, patience_s)

    def _bound_swap(self, limits: Limits) -> None:
        # Absent where the kernel does not count it; in version 1 the two are counted together.
        name = "memory.swap.max" if self._unified else "memory.memsw.limit_in_bytes"
        path = self._folders["memory"] / name
        if limits.memory_bytes is not None and path.exists():
            path.write_text("0" if self._unified else str(limits.memory_bytes))


class Groups:
    """Where a driver makes the groups of its sandboxes.

    Args:
        places: for each controller, the folder to make them in.
        unified: whether this is version 2.
    """

    def __init__(self, places: Mapping[str, Path], *, unified: bool) -> None:
        self.places = places
        self.unified = unified

    @property
    def mechanism(self) -> Mechanism:
        return Mechanism.CGROUP2 if self.unified else Mechanism.CGROUP1

    def group(self, sandbox_id: str) -> Group:
        """That of a sandbox, not made yet."""
        folders = {name: place / f"{_PREFIX}{sandbox_id}" for name, place in self.places.items()}
        return Group(folders, unified=self.unified)

    def record(self, directory: Path, driver_id: str) -> None:
        """Note in the driver's directory where its groups are, for `sweep_groups`."""
        places = list(dict.fromkeys(map(str, self.places.values())))
        (directory / RECORD).write_text(json.dumps({"driver": driver_id, "places": places}))


def settings(limits: Limits, nice: int, *, unified: bool) -> Iterator[tuple[str, str, str]]:
    """The controller, file and value of each limit, and of the weight. Pure."""
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


def find_groups(mechanism: Mechanism, proc: Path = Path("/proc")) -> Groups | None:
    """Where this process may make groups; None where the watchdog has to do.

    In version 2 this process moves to a group of its own beside those of the sandboxes.

    Args:
        mechanism: what was asked for.
        proc: where the kernel tells of mounts and groups.

    Raises:
        SandboxError: groups were asked for by name, and cannot be had.
    """
    if mechanism is Mechanism.WATCHDOG:
        return None
    if mechanism is Mechanism.CGROUP1:
        return _find_legacy(proc)
    place, problem = delegated(proc)
    if place is not None:
        controllers, problem = _occupy(place)
        if not problem:
            return Groups(dict.fromkeys(controllers, place), unified=True)
    if mechanism is Mechanism.CGROUP2:
        raise SandboxError(
            f"no control groups of version 2: {problem}",
            hint="start the service with `systemd-run --user --scope -p Delegate=yes`, "
            "or set limits.mechanism to watchdog",
        )
    return None


def delegated(proc: Path = Path("/proc")) -> tuple[Path | None, str]:
    """The group this process is in, where its subtree is this user's to divide; else None, and the reason."""
    mount = next((at for at, kind, _ in _mounts(proc) if kind == "cgroup2"), None)
    if mount is None:
        return None, "no hierarchy is mounted"
    own = _memberships(proc).get("", "/")
    place = mount / own.lstrip("/")
    if place.name == _SERVICE:  # another driver of this process was faster
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
    """Whether the kernel shares the processors out by session (sched_autogroup), so that being nice makes no
    difference to other sessions: see sched(7). It does not do so in a group that has a weight.
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
    """Whether systemd says that the group is its user's to divide. To root, everything seems to be."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(place, name) == b"1":
                return True
    return False


def _occupy(place: Path) -> tuple[list[str], str]:
    """Clear `place` of this process and have it hand on its controllers.

    Returns:
        The controllers, and what stands in the way, empty where nothing does.
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
    return True  # it has ended


def _find_legacy(proc: Path) -> Groups:
    """The groups of version 1 that this process is in."""
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
    return Groups(places, unified=False)


def _mounts(proc: Path) -> Iterator[tuple[Path, str, str]]:
    """Every mount of a whole hierarchy: where, its kind, and its own options."""
    for line in (proc / "self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        kind, _, options = after.split(" ", 2)
        if kind.startswith("cgroup") and fields[3] == "/":
            yield Path(fields[4]), kind, options


def _memberships(proc: Path) -> dict[str, str]:
    """The path of this process's group in each hierarchy, by controller; that of version 2 under no name."""
    found = {}
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def sweep_groups(directory: Path) -> None:
    """Remove the groups of a killed driver, whose directory the caller has found abandoned.

    Args:
        directory: the driver's; what is recorded in it no sandbox could write.
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
            time.sleep(0.01)  # the killed are still on their way out: nothing tells when the group is empty
        else:
            return


def _kill_all(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for line in (folder / "cgroup.procs").read_text().split():
            if int(line) > 0:  # 0 is one that this pid namespace does not see
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
