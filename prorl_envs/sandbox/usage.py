"""How much memory and how many processes a sandbox uses, as its own /proc tells.

Its /proc lists the processes of its pid namespace and no others, whoever their parents are by now. It is
reached through the sandbox's root directory, and only by descriptors: everything in it may end at any moment.
What a process calls itself is hostile, the rest are the kernel's own figures.
"""

import contextlib
import os
import signal
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prorl_envs.sandbox.verdict import ProcessUse

#: Bytes of kernel memory behind an empty file in memory.
_INODE_BYTES = 1024
#: Descriptors looked at in one process.
_DESCRIPTOR_LIMIT = 4096
_PAGE = os.sysconf("SC_PAGESIZE")


def open_proc(root: str) -> int:
    """The /proc of the sandbox whose root directory the host sees at `root`. The caller closes it.

    Raises:
        OSError: it has ended, or is not this user's to look at.
    """
    return os.open(f"{root}/proc", os.O_RDONLY | os.O_DIRECTORY)


def processes(proc: int) -> list[ProcessUse]:
    """Every living process, with the resident memory the kernel counts for it."""
    names = [name for name in os.listdir(proc) if name.isdigit()]
    found = (parse_stat(_read(proc, f"{name}/stat")) for name in names)
    return [process for process in found if process is not None]


def parse_stat(text: bytes) -> ProcessUse | None:
    """From the content of a process's `stat`; None where it is empty or the process has ended."""
    head, _, rest = text.rpartition(b") ")
    fields = rest.split()
    if len(fields) < 22 or fields[0] in (b"Z", b"X"):
        return None
    pid, _, name = head.partition(b" (")
    return ProcessUse(
        pid=int(pid),
        parent=int(fields[1]),
        start=int(fields[19]),
        threads=int(fields[17]),
        ticks=sum(map(int, fields[11:15])),
        memory=int(fields[21]) * _PAGE,
        name=name.decode(errors="replace"),
    )


def private_and_shared(proc: int, process: ProcessUse) -> tuple[int, int]:
    """The bytes of memory that end with the process, its share of what it has in common with its relatives
    included, and its share of what lives in shared memory.

    What is mapped from files counts as neither: the kernel takes it back when it is needed. A process that
    is closed to readers counts with all that is resident.
    """
    fields = dict.fromkeys((b"Pss_Anon:", b"Pss_Shmem:"), -1)
    for line in _read(proc, f"{process.pid}/smaps_rollup").splitlines():
        name, _, value = line.partition(b" ")
        if name in fields:
            fields[name] = int(value.split()[0]) * 1024
    private, shared = fields.values()
    return (process.memory, 0) if private < 0 or shared < 0 else (private, shared)


def unlinked(
    proc: int, found: Iterable[ProcessUse], in_memory: Collection[int] = ()
) -> tuple[dict[int, int], int]:
    """Bytes of files that have no name any more and are kept by descriptors: in memory, for the first process
    that keeps them, and on disk.

    Args:
        in_memory: device numbers of file systems that count for themselves.
    """
    seen: set[tuple[int, int]] = set()
    memory: dict[int, int] = {}
    on_disk = 0
    for process in found:
        with contextlib.suppress(OSError):
            folder = os.open(f"{process.pid}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
            try:
                for status in _statuses(folder):
                    if status.st_nlink == 0 and (status.st_dev, status.st_ino) not in seen:
                        seen.add((status.st_dev, status.st_ino))
                        size = status.st_blocks * 512
                        if status.st_dev == _memory_device():
                            memory[process.pid] = memory.get(process.pid, 0) + size
                        elif status.st_dev not in in_memory:
                            on_disk += size
            finally:
                os.close(folder)
    return memory, on_disk


def _statuses(folder: int) -> Iterator[os.stat_result]:
    """Of the regular files behind the descriptors in `folder`. Nothing is opened."""
    for number in os.listdir(folder)[:_DESCRIPTOR_LIMIT]:
        with contextlib.suppress(OSError):
            status = os.stat(number, dir_fd=folder)
            if stat.S_ISREG(status.st_mode):
                yield status


class MemoryFiles:
    """The file systems in memory that a sandbox can write to, found when nothing hostile runs in it yet.

    Args:
        first: its first process, on the host.
        root: where the host sees its root directory.
    """

    def __init__(self, first: int, root: str) -> None:
        self._root = root
        self._places: dict[str, int] = {}
        for line in Path(f"/proc/{first}/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            target, options = before.split()[4:6]
            if after.startswith("tmpfs ") and "rw" in options.split(","):
                with contextlib.suppress(OSError):
                    self._places[target] = os.stat(f"{self._root}{target}").st_dev  # noqa: PTH116

    @property
    def devices(self) -> Collection[int]:
        """Their device numbers."""
        return self._places.values()

    def used(self) -> int:
        """Bytes in them, with what the kernel needs for each file."""
        total = 0
        for place, device in self._places.items():
            with contextlib.suppress(OSError):
                fd = os.open(f"{self._root}{place}", os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(fd).st_dev == device:  # else something else is there by now
                        status = os.fstatvfs(fd)
                        total += (status.f_blocks - status.f_bfree) * status.f_frsize
                        total += (status.f_files - status.f_ffree) * _INODE_BYTES
                finally:
                    os.close(fd)
        return total


@dataclass(frozen=True, slots=True)
class NodeUse:
    """What the whole machine uses.

    Args:
        memory: bytes that are not available.
        shared: bytes of shared memory and files in memory.
        tasks: processes and threads.
    """

    memory: int
    shared: int
    tasks: int

    def __add__(self, other: "NodeUse") -> "NodeUse":
        return NodeUse(self.memory + other.memory, self.shared + other.shared, self.tasks + other.tasks)

    def least(self, other: "NodeUse") -> "NodeUse":
        """The lesser of each."""
        pairs = (self.memory, other.memory), (self.shared, other.shared), (self.tasks, other.tasks)
        return NodeUse(*map(min, pairs))


def node_use() -> NodeUse:
    """What the whole machine uses now. Costs some tens of microseconds."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    known = {fields[0]: int(fields[1]) * 1024 for fields in lines}
    tasks = Path("/proc/loadavg").read_text().split()[3].partition("/")[2]
    return NodeUse(known["MemTotal:"] - known["MemAvailable:"], known["Shmem:"], int(tasks))


def kill(proc: int, process: ProcessUse) -> bool:
    """Kill `process` if it is still the one that was looked at. Returns whether it was.

    Its folder serves as its pidfd: its number in the sandbox is none by which it could be killed here.
    """
    with contextlib.suppress(OSError):
        folder = os.open(str(process.pid), os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
        try:
            now = parse_stat(_read(folder, "stat"))
            if now is not None and now.start == process.start:
                signal.pidfd_send_signal(folder, signal.SIGKILL)
                return True
        finally:
            os.close(folder)
    return False


def _read(folder: int, path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY, dir_fd=folder)
    except OSError:
        return b""
    try:
        return os.read(fd, 4096)
    except OSError:  # it has ended meanwhile, or does not want to be read
        return b""
    finally:
        os.close(fd)


def _memory_device() -> int:
    """Where anonymous shared memory lies, memory files among it."""
    if not _devices:
        fd = os.memfd_create("device")
        try:
            _devices.append(os.fstat(fd).st_dev)
        finally:
            os.close(fd)
    return _devices[0]


_devices: list[int] = []
