"""State of one sandbox under the watchdog, and the actions when it reaches a limit.

The functions here block briefly and are called from the watchdog's thread.
"""

import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Protocol

from prorl_envs.errors import SandboxError, SandboxLimit, SandboxMemoryLimit
from prorl_envs.sandbox.base import SandboxLimits
from prorl_envs.sandbox.filesystem.disk_usage import DEPTH_LIMIT, DiskUse
from prorl_envs.sandbox.limits import usage
from prorl_envs.sandbox.limits.held_descriptors import Holdings, count_watches, holdings, memory_device
from prorl_envs.sandbox.limits.in_flight import buffered
from prorl_envs.sandbox.limits.kernel_counters import counters, excess
from prorl_envs.sandbox.limits.policy import (
    ProcessUse,
    branches,
    harmless,
    killed_words,
    size_words,
    spared,
    to_kill,
    without,
)
from prorl_envs.sandbox.linux.cgroups import ControlGroup

logger = logging.getLogger(__name__)

#: Consecutive over-limit checks before the sandbox is killed.
PATIENCE = 50
#: Seconds a sandbox may stay at its limit of processes before all but its shells are killed: a build that
#: starts too many processes backs off, a fork bomb does not.
AT_LIMIT_S = 1.0
#: Allowance for processes that count towards the limit and are not visible from here.
_UNSEEN_PROCESSES = 8
#: Seconds in which a sandbox's processes must be killed, and between two checks that they are gone.
_KILL_S = 5.0
_DYING_S = 0.005
_NOTICES = 16
#: Bounds of the pause between two checks of an active sandbox's descriptors: the shortest pause, in seconds;
#: the most checks per second, for all sandboxes together (a check takes 0.07 ms for an idle sandbox, 2.3 ms
#: with 400 descriptors); the least ratio of the pause to the last check's duration; the longest pause.
_DESCRIPTORS_S = 1.0
_DESCRIPTORS_RATE = 50
_DESCRIPTORS_FACTOR = 20
_DESCRIPTORS_MOST_S = 30.0
#: Seconds after which the descriptors of an idle sandbox are checked as well: a process can open some within
#: one tick (10 ms) of processor time, which does not show as activity. These checks take 0.4 % of a core for
#: a thousand sandboxes.
DESCRIPTORS_IDLE_S = 15.0
#: Consecutive checks that did not show all descriptors queued in a sandbox's sockets, before the
#: sandbox is killed. A single such check proves nothing: a process may be reading the queue.
_HIDDEN_CHECKS = 3
#: Kills of processes that this user may not read, before the sandbox is killed: a program without read
#: permission, as `sudo` is in some images, is started by mistake, but not often.
_HIDING_KILLS = 10
#: Sockets whose buffers need not be counted: 13 MB with the kernel's default sizes.
_FEW_SOCKETS = 32
#: Processor time, in the kernel's ticks, in which a fork of a tool server has started its program.
_STARTING_TICKS = 5
#: Ratio of the pause between two counts of epoll watches to the duration of a count. Low, since few programs
#: have many watches, and a program with many may be about to take all.
_COUNTING_FACTOR = 5


class MonitoredSandbox(Protocol):
    """The part of a sandbox that the watchdog uses."""

    @property
    def id(self) -> str: ...

    @property
    def alive(self) -> bool: ...

    @property
    def first_pid(self) -> int | None:
        """Host pid of the first process; None without a pid namespace."""
        ...

    @property
    def seen_root(self) -> str | None:
        """Host path of its root directory; None if the sandbox has no root of its own."""
        ...

    @property
    def servers_inside(self) -> frozenset[int]:
        """The pids, inside, of tool servers that run in its pid namespace."""
        ...

    async def measure_disk(self, *, size: int, files: int) -> DiskUse:
        """Measure its files on disk: see `disk_usage.measure`."""
        ...

    def end(self, why: SandboxError) -> None:
        """Close the sandbox; its users receive `why` as the error."""
        ...


@dataclass(slots=True, eq=False)
class SandboxMonitor:
    """Watchdog state of one sandbox. The thread adds notices, the event loop removes them.

    Args:
        sandbox: the sandbox.
        limits: its limits.
        group: its control group; None if the watchdog enforces the limits itself.
        due: time of the next check; earlier if the machine's use reaches `wake`.
        wake: use of the machine at which this sandbox, if it was idle, could be half-way to a limit.
        room: difference between `wake` and the machine's least use since the last check.
        over: consecutive checks at which its memory exceeded the limit.
        at_limit: since when it has been at the limit of processes; None if it is not.
        dying: pid and start of processes that were killed and still hold memory.
        killed: processes that the kernel has killed for memory.
        why: reason for which the watchdog has to close it; empty if there is none.
        killed_for: class of the error that its users then get.
        activity: processor time and processes at the last check; if unchanged, nothing was written.
        measured: when the size of its files was last measured; `measuring_s` is the duration.
        disk_use: use of the whole file system at that time.
        measured_activity: its `activity` at that time.
        tree_use: size of its own files at that time.
        judged_excess: the excessive amount at the last decision about the disk.
        offences: such decisions since it was last within its limits.
        holdings: its descriptors at their last check.
        node_memory: memory that the machine used when its own was last measured exactly.
        buffered: bytes in the buffers of its sockets at that time.
        descriptors_due: time of their next check if the sandbox has run since, so that its `activity` differs
            from `descriptors_activity`; `DESCRIPTORS_IDLE_S` later if it has not.
        hidden_checks: consecutive checks that could not see some descriptors in flight.
        hiding: pid and start of processes that this user could not read at the last check.
        hiding_kills: checks that killed such processes.
        unlinked_bytes: bytes of unlinked files on disk at the last decision about the disk.
        unreadable: consecutive checks that could not read its processes; `unreadable_why` is the last error.
    """

    sandbox: MonitoredSandbox
    limits: SandboxLimits
    group: ControlGroup | None
    notices: deque[str] = field(default_factory=lambda: deque(maxlen=_NOTICES))
    started: float = field(default_factory=time.monotonic)
    due: float = 0.0
    wake: usage.MachineUse | None = None
    room: usage.MachineUse | None = None
    files: usage.MemoryFiles | None = None
    over: int = 0
    at_limit: float | None = None
    dying: set[tuple[int, int]] = field(default_factory=set)
    killed: int = 0
    lock: Lock = field(default_factory=Lock)
    why: str = ""
    killed_for: type[SandboxLimit] = SandboxLimit
    disk_use: DiskUse = field(default_factory=lambda: DiskUse(0, 0))
    activity: tuple[int, int] = (0, 0)
    idle: bool = False
    measured_activity: tuple[int, int] = (0, 0)
    measured: float = field(default_factory=time.monotonic)
    measuring_s: float = 0.0
    tree_use: DiskUse = field(default_factory=lambda: DiskUse(0, 0))
    judged_excess: int = 0
    offences: int = 0
    holdings: Holdings = field(default_factory=Holdings)
    node_memory: int = 0
    buffered: int = 0
    descriptors_due: float = 0.0
    descriptors_activity: tuple[int, int] = (0, 0)
    hidden_checks: int = 0
    hiding: set[tuple[int, int]] = field(default_factory=set)
    hiding_kills: int = 0
    unlinked_bytes: int = 0
    unreadable: int = 0
    unreadable_why: str = ""

    @property
    def is_checked(self) -> bool:
        """True if its memory, processes and descriptors have to be checked."""
        return self.sandbox.first_pid is not None

    @property
    def descriptors_outdated(self) -> bool:
        """True if its descriptors may have changed since the last check, or if that did not see all."""
        return self.activity != self.descriptors_activity or self.hidden_checks > 0

    @property
    def has_disk_limit(self) -> bool:
        return self.limits.disk_bytes is not None or self.limits.disk_files is not None

    def tell(self, text: str) -> None:
        """Log a notice, and keep it for the model to read."""
        logger.warning("sandbox %s: %s", self.sandbox.id, text)
        self.notices.append(f"[{text}]")

    def take(self) -> list[str]:
        """Return the notices since the last call."""
        if self.group is not None:
            self.note_killed(self.group.killed())
        taken = []
        while self.notices:  # the thread only adds
            taken.append(self.notices.popleft())
        return taken

    def note_killed(self, count: int) -> None:
        """Add a notice if the kernel killed more processes for memory; `count` is the total so far."""
        with self.lock:  # called from the loop and from the thread
            killed, self.killed = count - self.killed, max(count, self.killed)
        if killed > 0:
            victims = "a process was" if killed == 1 else f"{killed} processes were"
            self.tell(f"{_memory_limit(self.limits)} was reached: {victims} killed")


def check_sandbox(
    watch: SandboxMonitor, first: int, proc: int, sandboxes: int, node: usage.MachineUse
) -> tuple[int | None, int | None]:
    """Check one sandbox's memory, processes and descriptors, and enforce its limits.

    Args:
        first: host pid of its first process.
        proc: descriptor of its /proc.
        sandboxes: number of all sandboxes.
        node: the machine's use.

    Returns:
        Bytes of memory and processes left up to the limits; None if a limit is not checked here.
    """
    processes, dead = usage.living_and_dead(proc)
    found = without(processes, watch.dying)
    watch.dying &= {(process.pid, process.start) for process in processes}
    if watch.group is not None:
        watch.note_killed(watch.group.killed())
    limits = watch.limits
    processes_left = memory_left = None
    before, watch.activity = watch.activity, (sum(process.ticks for process in found), len(found))
    watch.idle = before == watch.activity
    if before == (0, 0):
        watch.measured_activity = watch.activity  # no command has run in it yet
        watch.node_memory = node.memory
    hiding = [process for process in _without_servers(watch, found) if _hides(watch, process)]
    before_hiding, watch.hiding = watch.hiding, {(process.pid, process.start) for process in hiding}
    if hiding:
        # A process that starts a program or exits cannot be read for a moment, but not at two checks.
        _kill_hiding(watch, proc, [p for p in hiding if (p.pid, p.start) in before_hiding])
        return 0, 0  # the measurements are incomplete: check again soon
    if limits.processes is not None:
        processes_left = limits.processes - len(found)
        if _judge_processes(watch, proc, found, dead, limits.processes):
            return 0, 0  # the measurements are outdated: check again
    delay_s = 0.0 if watch.descriptors_outdated else DESCRIPTORS_IDLE_S
    if time.monotonic() >= watch.descriptors_due + delay_s:
        _judge_descriptors(watch, proc, found, sandboxes)
    if limits.memory_bytes is not None and watch.group is None:
        memory_left = _judge_memory(watch, first, proc, found, limits.memory_bytes, node.memory)
    return memory_left, processes_left


def _hides(watch: SandboxMonitor, process: ProcessUse) -> bool:
    """Return True for a process that this user may not read, so that its memory and files do not count.

    A fork of a tool server cannot be read either until it has started its program. Where tool servers are
    inside, there is no user namespace of this user's, so that programs may hide, such as a grader's.
    """
    if watch.sandbox.servers_inside:
        return False
    forked = process.forked and process.parent == 0
    return not (process.readable or (forked and process.ticks < _STARTING_TICKS))


def _kill_hiding(watch: SandboxMonitor, proc: int, hiding: list[ProcessUse]) -> None:
    if not hiding:
        return
    names = [harmless(process.name) for process in hiding]
    words = killed_words(names, len(hiding))
    watch.tell(f"{words}: processes that forbid reading their memory and files are not allowed")
    for process in hiding:
        usage.kill(proc, process)
    watch.dying |= {(process.pid, process.start) for process in hiding}
    watch.hiding_kills += 1
    if watch.hiding_kills > _HIDING_KILLS:
        watch.why = "it keeps starting processes that forbid reading their memory and files"


def _judge_descriptors(watch: SandboxMonitor, proc: int, found: list[ProcessUse], sandboxes: int) -> None:
    started = time.thread_time()  # CPU time, because waiting for a processor must not lengthen the pause
    current = holdings(proc, found, () if watch.files is None else watch.files.devices)
    counting_s = _count_watches(proc, current)
    watch.holdings = current
    took_s = time.thread_time() - started
    watch.descriptors_activity = watch.activity
    pause_s = max(
        _DESCRIPTORS_S,
        sandboxes / _DESCRIPTORS_RATE,
        took_s * _DESCRIPTORS_FACTOR,
        counting_s * _COUNTING_FACTOR,
    )
    watch.descriptors_due = time.monotonic() + min(pause_s, _DESCRIPTORS_MOST_S)
    watch.hidden_checks = watch.hidden_checks + 1 if current.hidden else 0
    watch.unlinked_bytes = min(watch.unlinked_bytes, current.on_disk)
    if why := excess(watch.holdings, counters()):
        watch.why = why
    elif watch.hidden_checks >= _HIDDEN_CHECKS:
        watch.why = f"it keeps {current.hidden} hidden descriptors in flight"


def _count_watches(proc: int, current: Holdings) -> float:
    """Count epoll watches. Return the seconds of processor time that it took."""
    if "watches" not in counters():
        return 0.0
    current.watches, took_s = count_watches(proc, current.epolls, counters()["watches"].share)
    return took_s


def holdings_of(watch: SandboxMonitor) -> Holdings:
    """Return a sandbox's current descriptors; empty if it has stopped. May be called from any thread."""
    root = watch.sandbox.seen_root
    if root is not None:
        with contextlib.suppress(OSError), usage.opened_proc(root) as proc:  # the sandbox is stopping
            current = holdings(proc, usage.processes(proc))
            _count_watches(proc, current)
            return current
    return Holdings()


def _judge_processes(
    watch: SandboxMonitor, proc: int, found: list[ProcessUse], dead: int, limit: int
) -> bool:
    """Kill the processes if they are too many. Return True if they were killed."""
    count = len(found)
    now = time.monotonic()
    # Threads and uncollected dead processes count if the kernel enforces the limit.
    if dead + sum(process.threads for process in found) >= limit - _UNSEEN_PROCESSES:
        watch.at_limit = watch.at_limit or now
    else:
        watch.at_limit = None
    if count > limit or (watch.at_limit is not None and now >= watch.at_limit + AT_LIMIT_S):
        watch.at_limit = None
        # The notice comes first: the answer to the killed command must include it.
        watch.tell(f"the sandbox's limit of {limit} processes was reached: all but its shells were killed")
        if not _kill_all(proc, watch.sandbox.servers_inside):
            watch.why = "it starts processes faster than they can be killed"
        return True
    return False


def memory_of(watch: SandboxMonitor) -> int | None:
    """Return the bytes of memory that count towards a sandbox's limit; None if it has stopped or has no
    pid namespace. May be called from any thread."""
    first, root = watch.sandbox.first_pid, watch.sandbox.seen_root
    if first is None or root is None:
        return None
    with contextlib.suppress(OSError), usage.opened_proc(root) as proc:  # the sandbox is stopping
        return _exact_memory(watch, proc, _without_servers(watch, usage.processes(proc)))[1]
    return None


def _without_servers(watch: SandboxMonitor, found: list[ProcessUse]) -> list[ProcessUse]:
    """Leave out the service's own processes in the sandbox. Most drivers have none inside."""
    return [process for process in found if process.pid not in {1, *watch.sandbox.servers_inside}]


def _judge_memory(
    watch: SandboxMonitor, first: int, proc: int, found: list[ProcessUse], limit: int, node_memory: int
) -> int:
    found = _without_servers(watch, found)
    if watch.files is None:
        root = watch.sandbox.seen_root
        assert root is not None
        watch.files = usage.MemoryFiles(first, root)
    in_files = watch.files.used()
    # An upper bound: shared memory counts once per process; memory files and buffers of sockets, which no
    # process shows, as at the last check, with all by which the machine's use has grown since.
    grown = max(0, node_memory - watch.node_memory)
    in_processes = sum(process.memory + process.tables for process in found)
    in_queues = sum(watch.holdings.memory.values()) + watch.buffered
    at_most = in_processes + in_files + in_queues + grown
    if at_most < limit:
        return limit - at_most
    watch.node_memory = node_memory
    exact, used, in_files = _exact_memory(watch, proc, found)
    if used <= limit:
        watch.over = 0
        return limit - used
    watch.over += 1
    chosen = (
        list(to_kill(branches(exact, watch.sandbox.servers_inside), used - limit)) if used > in_files else []
    )
    victims = {process for branch in chosen for process in branch.processes}
    if victims:
        words = killed_words([branch.name for branch in chosen], len(victims))
        watch.tell(f"{_memory_limit(watch.limits)} was reached: {words}")
    for process in victims:
        usage.kill(proc, process)
    watch.dying |= {(process.pid, process.start) for process in victims}
    if not chosen or watch.over > PATIENCE:
        watch.why = f"{_memory_limit(watch.limits)} was exceeded, and killing its processes is no help"
        watch.killed_for = SandboxMemoryLimit
    return 0


def _exact_memory(
    watch: SandboxMonitor, proc: int, found: list[ProcessUse]
) -> tuple[list[ProcessUse], int, int]:
    """Return the processes with exact memory, the sandbox's memory, and its part that no kill can free."""
    current = holdings(proc, found)
    current.watches, watch.holdings = watch.holdings.watches, current
    unlinked = current.memory
    buffers = buffered(current.sockets) if len(current.sockets) > _FEW_SOCKETS else {}
    watch.buffered = sum(buffers.values())
    exact, private, mapped = [], 0, 0
    for process in found:
        unshared, shared = usage.private_and_shared(proc, process)
        unshared += buffers.get(process.pid, 0)
        private, mapped = private + unshared, mapped + shared
        exact.append(replace(process, memory=unshared + max(shared, unlinked.get(process.pid, 0))))
    in_files = watch.files.used() if watch.files is not None else 0
    # Most mapped memory is also counted as files: take the larger of the two.
    return exact, private + max(mapped, in_files + sum(unlinked.values())), in_files


def _kill_all(proc: int, servers: frozenset[int], *, shells: bool = False) -> bool:
    """Kill processes until only shells are left.

    Args:
        servers: tool servers, which are spared.
        shells: kill the shells too.

    Returns:
        False if new processes kept appearing.
    """
    deadline = time.monotonic() + _KILL_S
    killed: set[tuple[int, int]] = set()
    while time.monotonic() < deadline:
        found = usage.processes(proc)
        # After the first round, new shells and the next commands of shells are spared.
        spared_pids = {1, *servers} if shells and not killed else spared(found, servers)
        others = [process for process in found if process.pid not in spared_pids]
        if killed:
            next_commands = [process for process in others if process.parent in spared_pids - {1, *servers}]
            others = [process for process in others if process not in without(next_commands, killed)]
        if not others:
            return True
        fresh = without(others, killed)
        for process in fresh:
            usage.kill(proc, process)
        killed |= {(process.pid, process.start) for process in fresh}
        if not fresh:
            time.sleep(_DYING_S)  # dying processes still have to release their memory
    return False


def judge_disk(watch: SandboxMonitor) -> None:
    """Kill a sandbox's commands if it exceeds its disk limits, and again whenever its files have grown.

    Nothing is killed while the files shrink. The first time, shells are spared; later they are killed too,
    since they may be the writers.
    """
    first = watch.sandbox.first_pid
    root = watch.sandbox.seen_root
    if first is None or root is None:
        _decide_on_disk(watch, 0, None)
        return
    with contextlib.suppress(OSError), usage.opened_proc(root) as proc:  # the sandbox is stopping
        in_memory = () if watch.files is None else watch.files.devices
        found = usage.processes(proc)
        current = holdings(proc, found, in_memory)
        current.watches, watch.holdings = watch.holdings.watches, current
        watch.unlinked_bytes = current.on_disk
        mapped = usage.deleted_mappings(proc, found, (memory_device(), *in_memory), current.inodes)
        _decide_on_disk(watch, current.on_disk + mapped, proc)


def _decide_on_disk(watch: SandboxMonitor, unlinked: int, proc: int | None) -> None:
    limits, size, files = watch.limits, watch.tree_use.size + unlinked, watch.tree_use.files
    if watch.tree_use.too_deep:
        watch.why = f"its directories are nested more than {DEPTH_LIMIT} deep, so its files cannot be counted"
        return
    if limits.disk_bytes is not None and size > limits.disk_bytes:
        reason = f"the sandbox's disk limit of {size_words(limits.disk_bytes)} was reached"
        now, far = size, size > 2 * limits.disk_bytes
    elif limits.disk_files is not None and files > limits.disk_files:
        reason = f"the sandbox's limit of {limits.disk_files} files was reached"
        now, far = files, files > 2 * limits.disk_files
    else:
        watch.judged_excess = watch.offences = 0
        return
    if now <= watch.judged_excess:
        return
    watch.judged_excess, watch.offences = now, watch.offences + 1
    if far or proc is None:
        watch.why = f"{reason} and far exceeded" if far else reason
        return
    watch.tell(f"{reason}: its running commands were killed; remove files before writing more")
    if not _kill_all(proc, watch.sandbox.servers_inside, shells=watch.offences > 1):
        watch.why = f"{reason}, and the writing processes cannot be stopped"


def _memory_limit(limits: SandboxLimits) -> str:
    if limits.memory_bytes is None:
        return "the machine's memory limit"
    return f"the sandbox's memory limit of {size_words(limits.memory_bytes)}"
