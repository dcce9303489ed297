"""Looks after the limits that the kernel does not keep by itself: one task and one thread for all sandboxes
of a driver, however many they are.

Memory and processes are looked at in the thread, as often as a sandbox could have reached its limit since
the last look; the thread also kills, so that nothing waits for the event loop. The disk is watched as a
whole, for one call says how full it is; a sandbox's own tree is measured only when enough was written to
matter.
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

from prorl_envs.errors import SandboxError, SandboxLimit
from prorl_envs.sandbox import usage
from prorl_envs.sandbox.base import Limits
from prorl_envs.sandbox.cgroups import Group
from prorl_envs.sandbox.disk import DiskUse
from prorl_envs.sandbox.verdict import next_look_s, size_words
from prorl_envs.sandbox.watch import Watch, Watched, judge_disk, look_at

logger = logging.getLogger(__name__)

#: Seconds between two looks at the disk as a whole.
DISK_S = 0.25
#: Seconds after which the tree of a sandbox that was active is measured in any case: others may have removed
#: meanwhile as much as it wrote. And how much longer than the measuring itself that has to be.
REMEASURE_S = 2.0
REMEASURE_FACTOR = 50
#: Seconds between two looks at a sandbox that used no processor, unless the machine's use grows meanwhile.
IDLE_S = 10.0
#: A sandbox that holds less is not ended to make room on a full disk: it was full before.
GUILTY_BYTES = 64 << 20
#: Seconds between two attempts to make room on a disk that is nearly full.
_ROOM_S = 2.0
#: Faults of our own, met while looking at single sandboxes, after which the watch is given up.
FAULTS_LIMIT = 8


class Watchdog:
    """Started by the first sandbox that needs it.

    Where looking at a sandbox fails as it never should, that sandbox ends and the watch goes on. Where that
    comes again and again, or the watch fails elsewhere, no limit is kept any more: all sandboxes end, and
    `check` refuses new ones.

    Args:
        directory: where sandboxes keep their files.
        reserve_bytes: of that file system, kept free.
    """

    def __init__(self, directory: Path, reserve_bytes: int) -> None:
        self._directory = directory
        self._reserve = reserve_bytes
        self._watches: dict[Watched, Watch] = {}
        self._task: asyncio.Task[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._changed = asyncio.Event()
        #: When it looks again by itself.
        self._asleep_until = 0.0
        self._disk_due = 0.0
        self._warned = False
        #: Which sandbox is being looked at.
        self._subject: Watch | None = None
        self._faults = 0
        self._given_up = self._closed = False
        self.looking_s = 0.0

    def check(self) -> None:
        """Raises SandboxError where limits are no longer kept."""
        if self._given_up:
            raise SandboxError(
                "no sandbox is started: the watchdog, which keeps their limits, has failed",
                hint="the log says why; a new driver has a new watchdog",
            )

    def add(self, sandbox: Watched, limits: Limits, group: Group | None) -> Watch:
        """Look after a sandbox from now on."""
        watch = Watch(sandbox, limits, group)
        watch.held = _held(os.statvfs(self._directory))
        # As after a look that has found nothing used yet; those who wait for the sandbox need the processor.
        first_s = next_look_s(limits.memory_bytes, limits.processes, took_s=0.0)
        watch.due = _together(watch.started + first_s, watch.started)
        self._watches[sandbox] = watch
        if self._task is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="watchdog")
            self._begin()
        if any(due < self._asleep_until for due in self._times(watch)):
            self._changed.set()
        if self._given_up:  # since `check`
            self._end_unwatched(watch)
        return watch

    def remove(self, sandbox: Watched) -> None:
        """It has closed."""
        self._watches.pop(sandbox, None)

    async def aclose(self) -> None:
        """End the task and the thread. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """The watch has ended: where that is by a fault, see the class."""
        if self._closed or task.cancelled() or (error := task.exception()) is None:
            return
        subject, self._subject = self._subject, None
        self._faults += 1
        if subject is not None and self._faults < FAULTS_LIMIT:
            logger.critical("the watchdog failed at sandbox %s", subject.sandbox.id, exc_info=error)
            self._end_unwatched(subject)
            self._begin()
            return
        logger.critical("the watchdog has failed: no sandbox runs without its limits", exc_info=error)
        self._given_up = True
        for watch in tuple(self._watches.values()):
            self._end_unwatched(watch)

    def _end_unwatched(self, watch: Watch) -> None:
        # Not a `SandboxLimit`: the fault is ours.
        self._watches.pop(watch.sandbox, None)
        if watch.sandbox.alive:
            watch.sandbox.end(
                SandboxError(f"sandbox {watch.sandbox.id} was ended: its limits can no longer be kept")
            )

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now = time.monotonic()
            self._end_the_old(now)
            if candidates := [watch for watch in self._watches.values() if _may_be_due(watch, now)]:
                node = usage.node_use()
                if due := [watch for watch in candidates if is_due(watch, node, now)]:
                    assert self._thread is not None
                    await loop.run_in_executor(self._thread, self._look, due, node)
                    self._end_the_guilty(due)
            if now >= self._disk_due:
                self._disk_due = time.monotonic() + DISK_S
                await self._look_at_disk()
            self._changed.clear()
            times = (due for watch in self._watches.values() for due in self._times(watch))
            self._asleep_until = min(times, default=math.inf)
            idle_s = max(0.0, self._asleep_until - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(idle_s) else idle_s):
                    await self._changed.wait()

    def _times(self, watch: Watch) -> Iterator[float]:
        """When something is due for it."""
        if watch.looked_at:
            yield watch.due
        if watch.limits.wall_s is not None:
            yield watch.started + watch.limits.wall_s
        if self._reserve or watch.on_disk or watch.wake is not None:
            yield self._disk_due

    def _end_the_old(self, now: float) -> None:
        for watch in tuple(self._watches.values()):
            wall_s = watch.limits.wall_s
            if wall_s is not None and now >= watch.started + wall_s:
                self._end(watch, f"it was {wall_s:g} s old, the most it may be")

    def _end_the_guilty(self, watches: Iterable[Watch]) -> None:
        for watch in watches:
            if watch.why:
                self._end(watch, watch.why)

    def _end(self, watch: Watch, why: str) -> None:
        self._watches.pop(watch.sandbox, None)
        if watch.sandbox.alive:
            logger.warning("sandbox %s is ended: %s", watch.sandbox.id, why)
            watch.sandbox.end(SandboxLimit(f"sandbox {watch.sandbox.id} was ended: {why}"))

    # In the thread.

    def _look(self, watches: Iterable[Watch], node: usage.NodeUse) -> None:
        for watch in watches:
            self._subject = watch
            started = time.monotonic()
            left: tuple[int | None, int | None] = (None, None)
            first, root = watch.sandbox.first_pid, watch.sandbox.seen_root
            if watch.sandbox.alive and first is not None and root is not None:
                with contextlib.suppress(OSError):  # it is ending
                    proc = usage.open_proc(root)
                    try:
                        left = look_at(watch, first, proc, node.shared)
                    finally:
                        os.close(proc)
            took = time.monotonic() - started
            self.looking_s += took
            now = time.monotonic()
            pause_s = next_look_s(*left, took_s=took)
            watch.room = half_way(*left) if watch.idle and pause_s > DISK_S else None
            watch.wake = None if watch.room is None else node + watch.room
            watch.due = _together(now + (pause_s if watch.wake is None else IDLE_S), now)
        self._subject = None

    # Back in the loop.

    async def _look_at_disk(self) -> None:
        status = os.statvfs(self._directory)
        held = _held(status)
        now = time.monotonic()
        suspects = [watch for watch in tuple(self._watches.values()) if _suspicious(watch, held, now)]
        for watch in suspects:
            self._subject = watch
            if await self._measure(watch, held):
                assert self._thread is not None
                await asyncio.get_running_loop().run_in_executor(self._thread, judge_disk, watch)
        self._subject = None
        self._end_the_guilty(suspects)
        if status.f_bavail * status.f_frsize < self._reserve:
            await self._make_room(held)
            self._disk_due = time.monotonic() + _ROOM_S

    async def _measure(self, watch: Watch, held: DiskUse) -> bool:
        """Measure a sandbox's tree; False where it has ended."""
        limits = watch.limits
        size = limits.disk_bytes if limits.disk_bytes is not None else 1 << 62
        files = limits.disk_files if limits.disk_files is not None else 1 << 62
        started, activity = time.monotonic(), watch.activity
        try:
            # Twice as far as it may go, so that what is far beyond is known to be.
            watch.use = await watch.sandbox.measure_disk(size=2 * size, files=2 * files)
        except SandboxError as error:
            if watch.sandbox.alive:
                logger.warning("sandbox %s: its files cannot be measured: %s", watch.sandbox.id, error)
            return False
        finally:
            watch.held, watch.active, watch.measured = held, activity, time.monotonic()
            watch.measuring_s = watch.measured - started
        return watch.sandbox.alive

    async def _make_room(self, held: DiskUse) -> None:
        """The disk itself is nearly full: end the sandbox that holds most of it."""
        watches = [watch for watch in tuple(self._watches.values()) if watch.sandbox.alive]
        for watch in watches:
            self._subject = watch
            await self._measure(watch, held)
        self._subject = None
        largest = max(watches, key=lambda watch: watch.use.size, default=None)
        if largest is not None and largest.use.size >= GUILTY_BYTES:
            held_words = size_words(largest.use.size)
            self._end(largest, f"the machine's disk is nearly full, and it holds {held_words} of it")
        elif not self._warned:
            self._warned = True
            logger.warning("less than %s are free in %s", size_words(self._reserve), self._directory)


def _may_be_due(watch: Watch, now: float) -> bool:
    """Whether it is due, or can be by what the machine uses."""
    return watch.looked_at and (watch.due <= now or watch.wake is not None)


def is_due(watch: Watch, node: usage.NodeUse, now: float) -> bool:
    """Whether to look at a sandbox now, given what the machine uses."""
    wake, room = watch.wake, watch.room
    if watch.due <= now or wake is None or room is None:
        return watch.due <= now
    if node.memory >= wake.memory or node.tasks >= wake.tasks:
        return True
    # What others give back meanwhile must not hide what this one takes: counted from the least there was.
    if node.memory + room.memory < wake.memory or node.tasks + room.tasks < wake.tasks:
        watch.wake = wake.least(node + room)
    return False


def half_way(memory_left: int | None, processes_left: int | None) -> usage.NodeUse:
    """By how much the machine would use more if a sandbox had gone half of its way to a limit."""
    memory = 1 << 62 if memory_left is None else memory_left // 2
    tasks = 1 << 62 if processes_left is None else processes_left // 2
    return usage.NodeUse(memory, 0, tasks)


def _together(due: float, now: float) -> float:
    """A time not after `due`, where that is far off one at which others are due as well.

    A thousand idle sandboxes wake the loop four times a second, and not five hundred times.
    """
    return due // DISK_S * DISK_S if due - now > 2 * DISK_S else due


def _suspicious(watch: Watch, held: DiskUse, now: float) -> bool:
    """Whether a sandbox can have reached a disk limit since its tree was last measured."""
    if not watch.on_disk or not watch.sandbox.alive:
        return False
    limits = watch.limits
    pairs = (
        (held.size - watch.held.size, limits.disk_bytes, watch.use.size),
        (held.files - watch.held.files, limits.disk_files, watch.use.files),
    )
    # From half of the way on: what it writes meanwhile must not carry it far beyond.
    near = any(new > 0 and limit is not None and new >= (limit - use) / 2 for new, limit, use in pairs)
    was_active = not watch.looked_at or watch.activity != watch.active
    pause_s = max(REMEASURE_S, REMEASURE_FACTOR * watch.measuring_s)
    return near or (was_active and now >= watch.measured + pause_s)


def _held(status: os.statvfs_result) -> DiskUse:
    """What is on a file system; one that does not count files has none."""
    return DiskUse((status.f_blocks - status.f_bfree) * status.f_frsize, status.f_files - status.f_ffree)
