"""One sandbox under the watchdog: what is known of it, and what is done when it reaches a limit.

The functions here block a little and are called from the watchdog's thread.
"""

import contextlib
import logging
import os
import time
from collections import deque
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Protocol

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox import usage
from prorl_envs.sandbox.base import Limits
from prorl_envs.sandbox.cgroups import Group
from prorl_envs.sandbox.disk import DiskUse
from prorl_envs.sandbox.verdict import (
    ProcessUse,
    branches,
    killed_words,
    size_words,
    spared,
    to_kill,
    without,
)

logger = logging.getLogger(__name__)

#: Looks in a row at which a sandbox was found over its limit, after which it ends.
PATIENCE = 50
#: Seconds a sandbox may stay at its limit of processes before all but its shells are killed: a build that
#: asks for too many backs off, a bomb does not.
AT_LIMIT_S = 1.0
#: Processes that count towards the limit and are not seen from here, with some to spare.
_UNSEEN = 8
#: Seconds between two full looks, for memory that no process maps.
_CLOSE_LOOK_S = 30.0
#: Seconds in which a sandbox's processes must be killed, and between two looks at whether they are gone.
_KILL_S = 5.0
_DYING_S = 0.005
_NOTICES = 16


class Watched(Protocol):
    """What the watchdog needs of a sandbox."""

    @property
    def id(self) -> str: ...

    @property
    def alive(self) -> bool: ...

    @property
    def first_pid(self) -> int | None:
        """Its first process on the host; None where it has no pid namespace."""
        ...

    @property
    def seen_root(self) -> str | None:
        """Where the host sees its root directory; None where it has none of its own."""
        ...

    @property
    def servers_inside(self) -> frozenset[int]:
        """The numbers of tool servers that run in its pid namespace."""
        ...

    async def measure_disk(self, *, size: int, files: int) -> DiskUse:
        """See `disk.measure`."""
        ...

    def end(self, why: SandboxError) -> None:
        """Close it, and give `why` as the reason to whoever uses it."""
        ...


@dataclass(slots=True, eq=False)
class Watch:
    """What is known of one sandbox. `notices` is filled by the thread and emptied by the loop.

    Args:
        sandbox: whose.
        limits: its.
        group: its control group; None where the watchdog keeps the limits itself.
        due: when to look next; earlier where `wake` is reached.
        wake: what the machine would use if this one, idle until now, could be half of the way to a limit.
        room: by how much that is more than the least the machine has used since the last look.
        activity: processor time and processes at the last look; what has not changed has written nothing.
        measured: when its tree was last measured, and how long that took.
        held: bytes and files on the file system then.
        active: its `activity` then.
        use: what was in its tree then.
        judged: what was too much at the last verdict.
    """

    sandbox: Watched
    limits: Limits
    group: Group | None
    notices: deque[str] = field(default_factory=lambda: deque(maxlen=_NOTICES))
    started: float = field(default_factory=time.monotonic)
    due: float = 0.0
    wake: usage.NodeUse | None = None
    room: usage.NodeUse | None = None
    files: usage.MemoryFiles | None = None
    closely: float = 0.0
    shared_before: int = 0
    over: int = 0
    at_limit: float | None = None
    dying: set[tuple[int, int]] = field(default_factory=set)
    killed: int = 0
    lock: Lock = field(default_factory=Lock)
    why: str = ""
    held: DiskUse = field(default_factory=lambda: DiskUse(0, 0))
    activity: tuple[int, int] = (0, 0)
    idle: bool = False
    active: tuple[int, int] = (0, 0)
    measured: float = field(default_factory=time.monotonic)
    measuring_s: float = 0.0
    use: DiskUse = field(default_factory=lambda: DiskUse(0, 0))
    judged: int = 0
    offences: int = 0

    @property
    def looked_at(self) -> bool:
        """Whether its memory or processes have to be looked at."""
        bounded = self.limits.memory_bytes is not None or self.limits.processes is not None
        return bounded and self.sandbox.first_pid is not None

    @property
    def on_disk(self) -> bool:
        return self.limits.disk_bytes is not None or self.limits.disk_files is not None

    def tell(self, text: str) -> None:
        """Log it, and keep it for the model to read."""
        logger.warning("sandbox %s: %s", self.sandbox.id, text)
        self.notices.append(f"[{text}]")

    def take(self) -> list[str]:
        """The notices since the last call."""
        if self.group is not None:
            self.note_killed(self.group.killed())
        taken = []
        while self.notices:  # the thread only adds
            taken.append(self.notices.popleft())
        return taken

    def note_killed(self, count: int) -> None:
        """Tell of what the kernel killed for memory since the last call, given all that it did."""
        with self.lock:  # the loop asks, and the thread looks
            killed, self.killed = count - self.killed, max(count, self.killed)
        if killed > 0:
            what = "a process was" if killed == 1 else f"{killed} processes were"
            self.tell(f"{_memory_limit(self.limits)} was reached: {what} killed")


def look_at(watch: Watch, first: int, proc: int, shared: int) -> tuple[int | None, int | None]:
    """Look at one sandbox's memory and processes, and act. Returns what is left of the two."""
    found = without(usage.processes(proc), watch.dying)
    watch.dying &= (
        {(process.pid, process.start) for process in usage.processes(proc)} if watch.dying else set()
    )
    if watch.group is not None:
        watch.note_killed(watch.group.killed())
    limits = watch.limits
    processes_left = memory_left = None
    before, watch.activity = watch.activity, (sum(process.ticks for process in found), len(found))
    watch.idle = before == watch.activity
    if before == (0, 0):
        watch.active = watch.activity  # nothing was told to run in it yet
    if limits.processes is not None:
        processes_left = limits.processes - len(found)
        if _judge_processes(watch, proc, found, limits.processes):
            return 0, 0  # what was seen is no more: look again
    if limits.memory_bytes is not None and watch.group is None:
        memory_left = _judge_memory(watch, first, proc, found, limits.memory_bytes, shared)
    return memory_left, processes_left


def _judge_processes(watch: Watch, proc: int, found: list[ProcessUse], limit: int) -> bool:
    """Returns whether they were too many, and have been killed."""
    count = len(found)
    now = time.monotonic()
    # Threads count, where it is the kernel that refuses more.
    if sum(process.threads for process in found) >= limit - _UNSEEN:
        watch.at_limit = watch.at_limit or now
    else:
        watch.at_limit = None
    if count > limit or (watch.at_limit is not None and now >= watch.at_limit + AT_LIMIT_S):
        watch.at_limit = None
        # Told first: the answer to the command that is killed must find it.
        watch.tell(f"the sandbox's limit of {limit} processes was reached: all but its shells were killed")
        if not _kill_all(proc, watch.sandbox.servers_inside):
            watch.why = "it starts processes faster than they can be killed"
        return True
    return False


def memory_of(watch: Watch) -> int | None:
    """Bytes of memory that count towards a sandbox's limit; None where it has none of its own, or has ended.
    May be called from any thread."""
    first, root = watch.sandbox.first_pid, watch.sandbox.seen_root
    if first is None or root is None:
        return None
    try:
        proc = usage.open_proc(root)
    except OSError:  # it is ending
        return None
    try:
        return _exact(watch, proc, _its_own(watch, usage.processes(proc)))[1]
    except OSError:
        return None
    finally:
        os.close(proc)


def _its_own(watch: Watch, found: list[ProcessUse]) -> list[ProcessUse]:
    """Without what is ours in there, which is no use of the sandbox's; elsewhere that lies outside."""
    return [process for process in found if process.pid not in {1, *watch.sandbox.servers_inside}]


def _judge_memory(
    watch: Watch, first: int, proc: int, found: list[ProcessUse], limit: int, shared: int
) -> int:
    found = _its_own(watch, found)
    rough = sum(process.memory for process in found) + max(0, shared - watch.shared_before)
    now = time.monotonic()
    if rough < limit and now < watch.closely + _CLOSE_LOOK_S:
        return limit - rough
    if watch.files is None:
        root = watch.sandbox.seen_root
        assert root is not None
        watch.files = usage.MemoryFiles(first, root)
    exact, used, elsewhere = _exact(watch, proc, found)
    watch.closely, watch.shared_before = now, shared - elsewhere
    if used <= limit:
        watch.over = 0
        return limit - used
    watch.over += 1
    chosen = (
        list(to_kill(branches(exact, watch.sandbox.servers_inside), used - limit))
        if used - elsewhere > 0
        else []
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
    return 0


def _exact(watch: Watch, proc: int, found: list[ProcessUse]) -> tuple[list[ProcessUse], int, int]:
    """The processes with what each holds, the sandbox's memory, and what of that no process's end frees."""
    unlinked, _ = usage.unlinked(proc, found)
    exact, private, mapped = [], 0, 0
    for process in found:
        own, shared = usage.private_and_shared(proc, process)
        private, mapped = private + own, mapped + shared
        exact.append(replace(process, memory=own + max(shared, unlinked.get(process.pid, 0))))
    in_files = watch.files.used() if watch.files is not None else 0
    # What is mapped is mostly also found as a file: the larger of the two.
    return exact, private + max(mapped, in_files + sum(unlinked.values())), in_files


def _kill_all(proc: int, servers: frozenset[int], *, shells: bool = False) -> bool:
    """Kill until a look finds none but the shells, or with `shells` none at all.

    Args:
        servers: tool servers, which are spared.

    Returns:
        False where more and more came.
    """
    deadline = time.monotonic() + _KILL_S
    killed: set[tuple[int, int]] = set()
    while time.monotonic() < deadline:
        found = usage.processes(proc)
        # After the first round, a shell is a new one, and what a shell starts is its next command: neither is
        # one of the guilty.
        tops = {1, *servers} if shells and not killed else spared(found, servers)
        others = [process for process in found if process.pid not in tops]
        if killed:
            began = [process for process in others if process.parent in tops - {1, *servers}]
            others = [process for process in others if process not in without(began, killed)]
        if not others:
            return True
        fresh = without(others, killed)
        for process in fresh:
            usage.kill(proc, process)
        killed |= {(process.pid, process.start) for process in fresh}
        if not fresh:
            time.sleep(_DYING_S)  # they are on their way out, and give back what they held
    return False


def judge_disk(watch: Watch) -> None:
    """Stop what writes once a sandbox has too much on disk, and again whenever it has grown from there.

    It may remove files in peace. At first its shells are spared, then they go too: it may be them who write.
    """
    first = watch.sandbox.first_pid
    root = watch.sandbox.seen_root
    if first is None or root is None:
        _decide_on_disk(watch, 0, None)
        return
    with contextlib.suppress(OSError):  # it is ending
        proc = usage.open_proc(root)
        try:
            in_memory = () if watch.files is None else watch.files.devices
            _, unlinked = usage.unlinked(proc, usage.processes(proc), in_memory)
            _decide_on_disk(watch, unlinked, proc)
        finally:
            os.close(proc)


def _decide_on_disk(watch: Watch, unlinked: int, proc: int | None) -> None:
    limits, size, files = watch.limits, watch.use.size + unlinked, watch.use.files
    if limits.disk_bytes is not None and size > limits.disk_bytes:
        what = f"the sandbox's disk limit of {size_words(limits.disk_bytes)} was reached"
        now, far = size, size > 2 * limits.disk_bytes
    elif limits.disk_files is not None and files > limits.disk_files:
        what = f"the sandbox's limit of {limits.disk_files} files was reached"
        now, far = files, files > 2 * limits.disk_files
    else:
        watch.judged = watch.offences = 0
        return
    if now <= watch.judged:
        return
    watch.judged, watch.offences = now, watch.offences + 1
    if far or proc is None:
        watch.why = f"{what} and far exceeded" if far else what
        return
    watch.tell(f"{what}: its running commands were killed; remove files before writing more")
    if not _kill_all(proc, watch.sandbox.servers_inside, shells=watch.offences > 1):
        watch.why = f"{what}, and what writes cannot be stopped"


def _memory_limit(limits: Limits) -> str:
    if limits.memory_bytes is None:
        return "the machine's memory limit"
    return f"the sandbox's memory limit of {size_words(limits.memory_bytes)}"
