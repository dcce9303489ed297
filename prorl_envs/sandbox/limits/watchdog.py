"""Watchdog for the limits that the kernel does not enforce: one task and one thread per driver.

The thread checks memory and processes, whenever a sandbox could have reached a limit since its last check. It
also kills processes, without waiting for the event loop. The disk is watched as a whole, since one call
returns its use; the files of one sandbox are measured only after enough was written to matter.
"""

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxLimits
from prorl_envs.sandbox.filesystem.disk_usage import DiskUse
from prorl_envs.sandbox.limits import usage
from prorl_envs.sandbox.limits.held_descriptors import Holdings
from prorl_envs.sandbox.limits.kernel_counters import counters, largest_holder
from prorl_envs.sandbox.limits.monitor import (
    MonitoredSandbox,
    SandboxMonitor,
    check_sandbox,
    holdings_of,
    judge_disk,
)
from prorl_envs.sandbox.limits.policy import next_check_s, size_words
from prorl_envs.sandbox.linux.cgroups import ControlGroup

logger = logging.getLogger(__name__)

#: Seconds between two checks of the disk as a whole.
DISK_S = 0.25
#: Seconds after which the files of an active sandbox are measured in any case, since others may have removed
#: as much as it wrote; and the least ratio of that time to the duration of a measurement.
REMEASURE_S = 2.0
REMEASURE_FACTOR = 50
#: Seconds between two checks of a sandbox that used no processor, unless the machine's use grows meanwhile.
IDLE_S = 10.0
#: A sandbox with fewer bytes on a full disk is not killed to make room: then other files fill the disk.
GUILTY_BYTES = 64 << 20
#: Seconds between two attempts to make room on a disk that is nearly full.
_ROOM_S = 2.0
#: Growth of the kernel's own memory, in bytes, after which idle sandboxes are checked: a tenth of the memory
#: of all epoll watches of a user.
KERNEL_GROWTH = 64 << 20
#: Internal errors in checks of single sandboxes after which the watchdog gives up.
FAULTS_LIMIT = 8
#: Seconds for which a watchdog that gave up is not started again.
GIVEN_UP_S = 30.0
#: Consecutive failures to read a running sandbox's /proc after which the sandbox is closed.
UNREADABLE_LIMIT = 5


class Watchdog:
    """Task and thread that check the limits; started for the first sandbox.

    If the check of a sandbox raises an unexpected error, or repeatedly cannot read its processes, that
    sandbox is closed and the watchdog continues. If errors recur, or the watchdog fails elsewhere, limits can
    no longer be enforced: all sandboxes are closed, and `check` refuses new ones for a while.

    Args:
        directory: directory of the sandboxes' files.
        reserve_bytes: bytes to keep free on its file system.
    """

    def __init__(self, directory: Path, reserve_bytes: int) -> None:
        self._directory = directory
        self._reserve = reserve_bytes
        self._watches: dict[MonitoredSandbox, SandboxMonitor] = {}
        self._task: asyncio.Task[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._changed = asyncio.Event()
        #: When the next check is due.
        self._asleep_until = 0.0
        self._disk_due = 0.0
        self._warned = False
        #: The sandbox that is being checked.
        self._checked: SandboxMonitor | None = None
        self._faults = 0
        #: When it gave up, and why; None if it works.
        self._given_up: tuple[float, str] | None = None
        self._closed = False

    def check(self) -> None:
        """Raise SandboxError if limits are no longer enforced."""
        if self._given_up is None:
            return
        since, why = self._given_up
        if time.monotonic() < since + GIVEN_UP_S:
            raise SandboxError(
                f"no sandbox can be started: the watchdog that enforces their limits has failed: {why}",
                hint=f"it is started again {GIVEN_UP_S:g} s after its failure",
            )
        self._given_up, self._faults, self._task = None, 0, None

    def add(
        self, sandbox: MonitoredSandbox, limits: SandboxLimits, group: ControlGroup | None
    ) -> SandboxMonitor:
        """Start to watch a sandbox."""
        watch = SandboxMonitor(sandbox, limits, group)
        watch.disk_use = _file_system_use(os.statvfs(self._directory))
        # Not checked at once: the clients that wait for the sandbox need the processor.
        first_s = next_check_s(limits.memory_bytes, limits.processes, took_s=0.0)
        watch.due = _round_down(watch.started + first_s, watch.started)
        self._watches[sandbox] = watch
        if self._task is None:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="watchdog")
            self._start()
        if any(due < self._asleep_until for due in self._times(watch)):
            self._changed.set()
        if self._given_up is not None:  # it gave up after the caller had called `check`
            self._end_unwatched(watch)
        return watch

    def remove(self, sandbox: MonitoredSandbox) -> None:
        """Stop watching a sandbox that has closed."""
        self._watches.pop(sandbox, None)

    async def aclose(self) -> None:
        """Stop the task and the thread. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown)

    def _start(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Handle the end of the task: for errors, see the class."""
        if self._closed or task.cancelled() or (error := task.exception()) is None:
            return
        checked, self._checked = self._checked, None
        self._faults += 1
        if checked is not None and self._faults < FAULTS_LIMIT:
            logger.critical("the watchdog failed at sandbox %s", checked.sandbox.id, exc_info=error)
            self._end_unwatched(checked)
            self._start()
            return
        logger.critical("the watchdog has failed: all sandboxes are closed", exc_info=error)
        self._given_up = time.monotonic(), str(error) or type(error).__name__
        for watch in tuple(self._watches.values()):
            self._end_unwatched(watch)

    def _end_unwatched(self, watch: SandboxMonitor, why: str = "") -> None:
        # Not a `SandboxLimit`: the error is internal.
        self._watches.pop(watch.sandbox, None)
        if watch.sandbox.alive:
            reason = f": {why}" if why else ""
            watch.sandbox.end(
                SandboxError(
                    f"sandbox {watch.sandbox.id} was ended: its limits can no longer be enforced{reason}"
                )
            )

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now = time.monotonic()
            self._end_expired(now)
            if candidates := [watch for watch in self._watches.values() if _may_be_due(watch, now)]:
                node = usage.node_use()
                if due := [watch for watch in candidates if is_due(watch, node, now)]:
                    assert self._thread is not None
                    await loop.run_in_executor(self._thread, self._check_due, due, node)
                    self._end_offenders(due)
                    self._keep_headroom()
            if now >= self._disk_due:
                self._disk_due = time.monotonic() + DISK_S
                await self._check_disk()
            self._changed.clear()
            times = (due for watch in self._watches.values() for due in self._times(watch))
            self._asleep_until = min(times, default=math.inf)
            idle_s = max(0.0, self._asleep_until - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(idle_s) else idle_s):
                    await self._changed.wait()

    def _times(self, watch: SandboxMonitor) -> Iterator[float]:
        """Yield the times at which checks of a sandbox are due."""
        if watch.is_checked:
            yield watch.due
        if watch.limits.lifetime_s is not None:
            yield watch.started + watch.limits.lifetime_s
        if self._reserve or watch.has_disk_limit or watch.wake is not None:
            yield self._disk_due

    def _end_expired(self, now: float) -> None:
        for watch in tuple(self._watches.values()):
            lifetime_s = watch.limits.lifetime_s
            if lifetime_s is not None and now >= watch.started + lifetime_s:
                self._end(watch, f"it reached its lifetime of {lifetime_s:g} s")

    def _end_offenders(self, watches: Iterable[SandboxMonitor]) -> None:
        for watch in watches:
            if watch.why:
                self._end(watch, watch.why)
            elif watch.unreadable >= UNREADABLE_LIMIT:
                logger.critical("sandbox %s cannot be checked: %s", watch.sandbox.id, watch.unreadable_why)
                self._end_unwatched(watch, watch.unreadable_why)

    def _keep_headroom(self, refused: int | None = None) -> MonitoredSandbox | None:
        """Kill the sandbox that `counters.largest_holder` chooses, and return it; None if there is none."""
        # Those that are closing too: they still hold it, and the caller waits for their close.
        holdings = {watch: watch.holdings for watch in self._watches.values()}
        chosen = largest_holder(holdings, counters(), refused)
        if chosen is None:
            return None
        watch, why = chosen
        self._end(watch, why)
        return watch.sandbox

    async def relieve(self, refused: int) -> MonitoredSandbox | None:
        """Make room after the kernel refused the service a resource.

        Args:
            refused: the error number.

        Returns:
            The killed sandbox; None if no sandbox holds enough to be the cause.
        """
        watches = tuple(self._watches.values())
        if self._thread is not None and not self._closed:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._thread, _all_holdings, watches)
            for watch, holdings in zip(watches, found, strict=True):
                watch.holdings = holdings
        return self._keep_headroom(refused)

    def _end(self, watch: SandboxMonitor, why: str) -> None:
        self._watches.pop(watch.sandbox, None)
        if watch.sandbox.alive:
            logger.warning("sandbox %s is ended: %s", watch.sandbox.id, why)
            watch.sandbox.end(watch.killed_for(f"sandbox {watch.sandbox.id} was ended: {why}"))

    # Runs in the thread.

    def _check_due(self, watches: Iterable[SandboxMonitor], node: usage.MachineUse) -> None:
        for watch in watches:
            self._checked = watch
            started = time.thread_time()
            remaining: tuple[int | None, int | None] = (None, None)
            first, root = watch.sandbox.first_pid, watch.sandbox.seen_root
            if watch.sandbox.alive and first is not None and root is not None:
                try:
                    with usage.opened_proc(root) as proc:
                        remaining = check_sandbox(watch, first, proc, len(self._watches), node)
                    watch.unreadable = 0
                except OSError as error:  # the sandbox is stopping; if it does not, see UNREADABLE_LIMIT
                    watch.unreadable, watch.unreadable_why = watch.unreadable + 1, str(error)
            took = time.thread_time() - started
            now = time.monotonic()
            pause_s = next_check_s(*remaining, took_s=took)
            may_wait = watch.idle and not watch.descriptors_outdated and pause_s > DISK_S
            watch.room = half_way(*remaining) if may_wait else None
            watch.wake = None if watch.room is None else node + watch.room
            watch.due = _round_down(now + (pause_s if watch.wake is None else IDLE_S), now)
        self._checked = None

    # Runs in the event loop.

    async def _check_disk(self) -> None:
        status = os.statvfs(self._directory)
        disk_use = _file_system_use(status)
        now = time.monotonic()
        suspects = [watch for watch in tuple(self._watches.values()) if _suspicious(watch, disk_use, now)]
        for watch in suspects:
            self._checked = watch
            if await self._measure(watch, disk_use):
                assert self._thread is not None
                await asyncio.get_running_loop().run_in_executor(self._thread, judge_disk, watch)
        self._checked = None
        self._end_offenders(suspects)
        if status.f_bavail * status.f_frsize < self._reserve:
            await self._make_room(disk_use)
            self._disk_due = time.monotonic() + _ROOM_S

    async def _measure(self, watch: SandboxMonitor, disk_use: DiskUse) -> bool:
        """Measure the size of a sandbox's files. Return False if the sandbox has stopped."""
        limits = watch.limits
        size = limits.disk_bytes if limits.disk_bytes is not None else 1 << 62
        files = limits.disk_files if limits.disk_files is not None else 1 << 62
        started, activity = time.monotonic(), watch.activity
        try:
            # Stop at twice the limit: a sandbox that reaches this is far beyond it.
            watch.tree_use = await watch.sandbox.measure_disk(size=2 * size, files=2 * files)
        except SandboxError as error:
            if watch.sandbox.alive:
                logger.warning("sandbox %s: its files cannot be measured: %s", watch.sandbox.id, error)
            return False
        finally:
            watch.disk_use, watch.measured_activity, watch.measured = disk_use, activity, time.monotonic()
            watch.measuring_s = watch.measured - started
        return watch.sandbox.alive

    async def _make_room(self, disk_use: DiskUse) -> None:
        """Kill the sandbox that holds the most of a nearly full disk."""
        watches = [watch for watch in tuple(self._watches.values()) if watch.sandbox.alive]
        for watch in watches:
            self._checked = watch
            await self._measure(watch, disk_use)
        self._checked = None
        largest = max(watches, key=lambda watch: watch.tree_use.size, default=None)
        if largest is not None and largest.tree_use.size >= GUILTY_BYTES:
            size = size_words(largest.tree_use.size)
            self._end(largest, f"the machine's disk is nearly full, and it holds {size} of it")
        elif not self._warned:
            self._warned = True
            logger.warning("less than %s are free in %s", size_words(self._reserve), self._directory)


def _all_holdings(watches: Iterable[SandboxMonitor]) -> list[Holdings]:
    return [holdings_of(watch) for watch in watches]


def _may_be_due(watch: SandboxMonitor, now: float) -> bool:
    """Return True if a check is due, or may be due depending on the machine's use."""
    return (watch.due <= now or watch.wake is not None) and watch.is_checked


def is_due(watch: SandboxMonitor, node: usage.MachineUse, now: float) -> bool:
    """Return True if a sandbox has to be checked now, given the machine's use."""
    wake, room = watch.wake, watch.room
    if watch.due <= now or wake is None or room is None:
        return watch.due <= now
    if node.memory >= wake.memory or node.tasks >= wake.tasks or 0 < wake.kernel <= node.kernel:
        return True
    # Memory that others release must not hide this sandbox's growth: count from the machine's least use.
    if (
        node.memory + room.memory < wake.memory
        or node.tasks + room.tasks < wake.tasks
        or node.kernel + room.kernel < wake.kernel
    ):
        watch.wake = wake.minimum(node + room)
    return False


def half_way(memory_left: int | None, processes_left: int | None) -> usage.MachineUse:
    """Return by how much the machine's use grows if a sandbox goes half of the way to a limit."""
    memory = 1 << 62 if memory_left is None else memory_left // 2
    tasks = 1 << 62 if processes_left is None else processes_left // 2
    return usage.MachineUse(memory, tasks, KERNEL_GROWTH)


def _round_down(due: float, now: float) -> float:
    """Round a distant time down to a time that other sandboxes share.

    A thousand idle sandboxes then wake the loop four times a second, not five hundred times.
    """
    return due // DISK_S * DISK_S if due - now > 2 * DISK_S else due


def _suspicious(watch: SandboxMonitor, disk_use: DiskUse, now: float) -> bool:
    """Return True if a sandbox can have reached a disk limit since its files were last measured."""
    if not watch.has_disk_limit:
        return False
    limits, before, use = watch.limits, watch.disk_use, watch.tree_use
    near = _half_way(disk_use.size - before.size, limits.disk_bytes, use.size) or _half_way(
        disk_use.files - before.files, limits.disk_files, use.files
    )
    was_active = not watch.is_checked or watch.activity != watch.measured_activity
    pause_s = max(REMEASURE_S, REMEASURE_FACTOR * watch.measuring_s)
    due = near or _unlinked_files_exceed_limit(watch) or (was_active and now >= watch.measured + pause_s)
    return due and watch.sandbox.alive  # asked last: it takes a system call


def _half_way(new: int, limit: int | None, use: int) -> bool:
    """Return True if writes during a measurement could carry a sandbox far beyond its limit."""
    return limit is not None and new > 0 and new >= (limit - use) / 2


def _unlinked_files_exceed_limit(watch: SandboxMonitor) -> bool:
    """Return True if unlinked files exceed the limit, and have grown since the last decision about the disk.

    The growth of the file system does not show them if others free as much, and on a loaded machine the next
    measurement can be a minute away.
    """
    limit, unlinked = watch.limits.disk_bytes, watch.holdings.on_disk
    return limit is not None and unlinked > watch.unlinked_bytes and watch.tree_use.size + unlinked > limit


def _file_system_use(status: os.statvfs_result) -> DiskUse:
    """Return the use of a file system; 0 files if it does not count them."""
    return DiskUse((status.f_blocks - status.f_bfree) * status.f_frsize, status.f_files - status.f_ffree)
