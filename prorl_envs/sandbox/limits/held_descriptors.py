"""Descriptors of a sandbox's processes, and the resources that they hold.

The kernel counts epoll watches and descriptors in flight per host user, open files per machine. Memory files
and unlinked files are freed with their last descriptor. The sandbox's /proc shows all of them; no file of the
sandbox is opened. A thread may have a descriptor table of its own (`unshare(CLONE_FILES)`).
"""

import contextlib
import os
import select
import stat
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prorl_envs.sandbox.limits.in_flight import WaitingSocket, count_waiting, duplicates, read_queues
from prorl_envs.sandbox.limits.policy import ProcessUse
from prorl_envs.sandbox.limits.usage import names
from prorl_envs.sandbox.linux.descriptors import opened

_CHUNK = 1 << 20
_EPOLL = "anon_inode:[eventpoll]"
#: A sandbox's share of file locks, which the kernel does not limit; more are not counted. They take 16 MB.
MOST_LOCKS = 65_536
#: Descriptors of a sandbox that are inspected, and its share of them if the machine does not limit them. With
#: their files, so many descriptors take 125 MB of kernel memory.
MOST_DESCRIPTORS = 131_072
#: Most seconds of processor time for a count of epoll watches (enough for some 200,000), and seconds between
#: two checks of that time.
_COUNTING_S, _JOIN_S = 1.0, 0.02


@dataclass(slots=True)
class Holdings:
    """Resources that a sandbox holds by descriptors.

    Args:
        descriptors: open descriptors of all processes, and those in flight.
        epolls: the epolls' `fdinfo` paths. An epoll inherited by several processes has one for each.
        watches: watches of these epolls, if they were counted.
        in_flight: descriptors sent over Unix sockets and not received, as far as the receiving sockets are
            open in a process or in flight themselves.
        hidden: the descriptors in flight whose files could not be seen.
        memory: bytes of unlinked memory files, by pid of the first process that has the file open, or has the
            socket open in which its descriptor waits.
        on_disk: bytes of unlinked files on disk.
        inodes: inodes of the files in `on_disk`.
        sockets: the sockets.
        locks: file locks of the processes.
        pipes: pipes, with and without a name.
    """

    descriptors: int = 0
    epolls: list[str] = field(default_factory=list)
    watches: int = 0
    in_flight: int = 0
    hidden: int = 0
    memory: dict[int, int] = field(default_factory=dict)
    on_disk: int = 0
    inodes: set[int] = field(default_factory=set)
    sockets: list[WaitingSocket] = field(default_factory=list)
    locks: int = 0
    pipes: int = 0


def holdings(proc: int, found: Iterable[ProcessUse], in_memory: Collection[int] = ()) -> Holdings:
    """Return what the processes of a sandbox hold by descriptors, without the number of epoll watches (see
    `count_watches`). A descriptor takes about 5 us. Blocks.

    Args:
        proc: descriptor of the sandbox's /proc.
        found: its processes.
        in_memory: device numbers of file systems in memory whose files are counted elsewhere.
    """
    inspection = _Inspection(Holdings(), frozenset(in_memory))
    for process in found:
        # Of the others, only the service's own processes are not killed: see `monitor.check_sandbox`.
        for place in _tables(proc, process) if process.readable else ():
            if inspection.result.descriptors + (count := _count(proc, place)) > MOST_DESCRIPTORS:
                inspection.result.descriptors += count  # more than its share, and reading them takes seconds
                return inspection.result
            try:
                with opened(f"{place}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc) as folder:
                    inspection.add_table(proc, place, folder, process)
            except PermissionError:
                inspection.add_duplicates(proc, place, process)
            except OSError:  # it has exited meanwhile
                pass
    inspection.add_queues()
    inspection.result.locks = _locks(proc)
    return inspection.result


def _locks(proc: int) -> int:
    """Count the file locks that the sandbox's /proc shows: those of its processes."""
    with opened("locks", dir_fd=proc) as fd:
        count = 0
        while count <= MOST_LOCKS and (data := os.read(fd, _CHUNK)):
            count += data.count(b"\n")
        return count


class _Inspection:
    """One inspection of a sandbox's descriptors.

    Args:
        result: the resources found so far.
        in_memory: see `holdings`.
    """

    def __init__(self, result: Holdings, in_memory: Collection[int]) -> None:
        self.result = result
        self._in_memory = in_memory
        self._seen: set[tuple[int, int]] = set()

    def add_table(self, proc: int, place: str, folder: int, process: ProcessUse) -> None:
        """Add the open descriptors of a process; `place` is its directory in /proc, `folder` its `fd`."""
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.stat(number, dir_fd=folder)
                anonymous = (status.st_dev, status.st_ino) == _machine.anonymous
                link = os.readlink(number, dir_fd=folder) if anonymous else ""
                self._add(proc, place, process, number, status, link)

    def add_duplicates(self, proc: int, place: str, process: ProcessUse) -> None:
        """Add the descriptors of a process that is not dumpable. Its `fd` belongs to root, but this user, who
        owns its user namespace, may list `fdinfo` and duplicate them."""
        with contextlib.suppress(OSError):  # it has exited meanwhile, or this machine forbids duplicates
            for number, status in duplicates(process, names(proc, f"{place}/fdinfo")):
                self._add(proc, place, process, number, status, _EPOLL)

    def _add(
        self, proc: int, place: str, process: ProcessUse, number: str, status: os.stat_result, link: str
    ) -> None:
        """Add a descriptor. `link` matters only for anonymous files."""
        self.result.descriptors += 1
        file = (status.st_dev, status.st_ino)
        if file == _machine.anonymous:
            if link == _EPOLL:
                self.result.epolls.append(f"{place}/fdinfo/{number}")
        elif stat.S_ISSOCK(status.st_mode) and file not in self._seen:
            self._seen.add(file)
            count = count_waiting(proc, f"{place}/fdinfo/{number}")
            self.result.sockets.append(WaitingSocket(process, int(number), file, count))
        else:
            self._add_file(status, process.pid)

    def add_queues(self) -> None:
        """Add the descriptors that wait in the sockets found."""
        for waits, queue in read_queues([waits for waits in self.result.sockets if waits.count]):
            for status in queue.files:
                self._add_file(status, waits.process.pid)
            self.result.in_flight += waits.count + queue.nested
            self.result.hidden += queue.hidden
        self.result.descriptors += self.result.in_flight

    def _add_file(self, status: os.stat_result, pid: int) -> None:
        file, is_pipe = (status.st_dev, status.st_ino), stat.S_ISFIFO(status.st_mode)
        if file in self._seen or not (is_pipe or (stat.S_ISREG(status.st_mode) and status.st_nlink == 0)):
            return
        self._seen.add(file)
        if is_pipe:
            self.result.pipes += 1
            return
        size = status.st_blocks * 512
        if status.st_dev == _machine.memory:
            self.result.memory[pid] = self.result.memory.get(pid, 0) + size
        elif status.st_dev not in self._in_memory:
            self.result.on_disk += size
            self.result.inodes.add(status.st_ino)


def _tables(proc: int, process: ProcessUse) -> Iterator[str]:
    """Yield the /proc paths of a process's descriptor tables, including the separate tables of its threads.

    A thread is assumed to share the table of its process if both have the same number of descriptors.
    """
    yield str(process.pid)
    if process.threads > 1:
        shared = _count(proc, str(process.pid))
        with contextlib.suppress(OSError):  # it has exited meanwhile
            for name in names(proc, f"{process.pid}/task"):
                place = f"{process.pid}/task/{name}"
                if int(name) != process.pid and _count(proc, place) != shared:
                    yield place


def _count(proc: int, place: str) -> int:
    with contextlib.suppress(OSError):  # it has exited meanwhile
        if _machine.counts:
            return os.stat(f"{place}/fd", dir_fd=proc).st_size
        return len(names(proc, f"{place}/fd"))
    return 0


def count_watches(proc: int, epolls: Sequence[str], enough: int) -> tuple[int, float]:
    """Count epoll watches; return more than `enough` if there are more, or if counting takes too long.

    An epoll keeps watches of closed descriptors as long as the files are open elsewhere, so there can be far
    more watches than descriptors. The kernel writes all lines (one per watch) twice before the first read
    returns: some seconds for a million. So a thread reads them, and its processor time is bounded.

    Args:
        proc: descriptor of the sandbox's /proc.
        epolls: see `Holdings`.

    Returns:
        The number, and the seconds of processor time that counting took.
    """
    if not epolls:
        return 0, 0.0
    counting = _Counting(os.dup(proc), epolls, enough)
    counting.start()
    while counting.is_alive() and counting.count <= enough:
        counting.join(_JOIN_S)
        if counting.cpu_s() > _COUNTING_S:
            return max(counting.count, enough + 1), counting.cpu_s()
    return counting.count, counting.took_s


class _Counting(threading.Thread):
    """Counting thread. After a timeout it still runs until its current read returns."""

    def __init__(self, proc: int, epolls: Sequence[str], enough: int) -> None:
        super().__init__(name="epoll watches", daemon=True)
        self._proc, self._epolls, self._enough = proc, epolls, enough
        self.count, self.took_s = 0, 0.0

    def run(self) -> None:
        try:
            for path in self._epolls:
                with contextlib.suppress(OSError), opened(path, dir_fd=self._proc) as fd:  # closed meanwhile
                    self._read(fd)
                if self.count > self._enough:
                    break
        finally:
            os.close(self._proc)
            self.took_s = time.thread_time()

    def cpu_s(self) -> float:
        """Return the processor time that the thread has used."""
        try:
            with open(f"/proc/self/task/{self.native_id}/schedstat", "rb") as file:  # noqa: PTH123
                return int(file.read().split()[0]) / 1e9
        except (OSError, IndexError):  # the thread has finished
            return 0.0

    def _read(self, fd: int) -> None:
        last = b""
        while data := os.read(fd, _CHUNK):
            self.count += (last + data).count(b"tfd:")
            last = data[-3:]


class _MachineProperties:
    """Properties that are the same for all processes of this machine.

    Attributes:
        anonymous: device and inode that the kernel reports for all epoll descriptors (and similar ones).
        memory: device of memory files and anonymous shared memory.
        counts: whether the size of /proc/PID/fd is the number of descriptors (since Linux 6.2).
    """

    def __init__(self) -> None:
        with select.epoll() as epoll:
            status = os.stat(f"/proc/self/fd/{epoll.fileno()}")  # noqa: PTH116
            self.anonymous = status.st_dev, status.st_ino
        fd = os.memfd_create("device")
        try:
            self.memory = os.fstat(fd).st_dev
        finally:
            os.close(fd)
        self.counts = os.stat("/proc/self/fd").st_size > 0  # noqa: PTH116


_machine = _MachineProperties()


def memory_device() -> int:
    """Return the device number of memory files and anonymous shared memory."""
    return _machine.memory
