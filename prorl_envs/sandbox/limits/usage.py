"""Memory and processes that a sandbox uses, as its own /proc shows.

Its /proc lists exactly the processes of its pid namespace, even those whose parents have exited. It is opened
below the sandbox's root directory and read through descriptors, since processes may exit at any moment.
Process names are untrusted; all other figures are the kernel's.
"""

import contextlib
import os
import signal
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import add
from pathlib import Path

from prorl_envs.sandbox.limits.policy import ProcessUse
from prorl_envs.sandbox.linux.descriptors import opened
from prorl_envs.sandbox.linux.proc_lines import proc_lines

#: Bytes of kernel memory behind an empty file in memory.
_INODE_BYTES = 1024
#: Most bytes read of a process's mappings.
_MAPS_BYTES = 16 << 20
_PAGE = os.sysconf("SC_PAGESIZE")
_STAT_BYTES = 4096
#: States of processes that have exited.
_EXITED = (b"Z", b"X")
#: The flag in `stat` of a process that has started no program since it was forked (PF_FORKNOEXEC).
_FORKED = 0x40
#: Bytes of kernel memory behind a mapping; most mappings of a process (`vm.max_map_count`), which count if
#: the text that lists them has more bytes than are read here.
_MAPPING_BYTES, _MOST_MAPPINGS, _FEW_MAPS_BYTES = 256, 65_530, 1 << 20
#: Bytes of an address space up to which its page tables are estimated, and bytes for each byte of them.
_SMALL_SPACE, _MAPPED_PER_TABLE = 256 << 20, 512


def opened_proc(root: str) -> AbstractContextManager[int]:
    """Open, during the block, the /proc of the sandbox whose root directory the host sees at `root`.

    Raises:
        OSError: the sandbox has stopped, or this user may not read it.
    """
    return opened(f"{root}/proc", os.O_RDONLY | os.O_DIRECTORY)


def processes(proc: int) -> list[ProcessUse]:
    """Return all living processes, with their resident memory."""
    return living_and_dead(proc)[0]


def living_and_dead(proc: int) -> tuple[list[ProcessUse], int]:
    """Return all living processes, and the number of dead ones that their parents have not collected.

    The kernel counts both towards a limit of processes.
    """
    living, dead = [], 0
    for name in os.listdir(proc):
        if name.isdigit():
            process, exited = _living(proc, name)
            dead += exited
            if process is not None:
                living.append(process)
    return living, dead


def _living(proc: int, name: str) -> tuple[ProcessUse | None, bool]:
    """Return a process if it lives, and whether it has exited but was not collected."""
    process, exited = _use_at(proc, name)
    if process is None or not exited:
        return process, False
    if process.threads > 1:
        # Its first thread has exited, other threads run: only their own files show the memory.
        with contextlib.suppress(OSError):  # it has exited meanwhile
            for thread in names(proc, f"{name}/task"):
                own, exited = _use_at(proc, f"{name}/task/{thread}")
                if own is not None and not exited:
                    own = replace(own, pid=process.pid, start=process.start, threads=process.threads)
                    return replace(own, parent=process.parent, ticks=process.ticks), False
    return None, True


def _use_at(proc: int, place: str) -> tuple[ProcessUse | None, bool]:
    """Return what a process's or thread's directory shows, None if it is gone; and whether it has exited."""
    with contextlib.suppress(OSError), opened(f"{place}/stat", dir_fd=proc) as fd:
        text = os.read(fd, _STAT_BYTES)
        readable = os.fstat(fd).st_uid == os.geteuid() or any(
            os.access(f"{place}/{name}", os.R_OK, dir_fd=proc, effective_ids=True)
            for name in ("fd", "fdinfo")
        )
        if not readable:  # or it has released its memory since, because it exits
            text = os.pread(fd, _STAT_BYTES, 0)
        if (use := parse_stat(text)) is not None:
            if use.mapped > _SMALL_SPACE:
                use = replace(use, tables=_page_tables(proc, place))
            if not readable and use.mapped:
                use = replace(use, readable=False)
            return use, _state(text) in _EXITED
    return None, False


def _state(text: bytes) -> bytes:
    place = text.rfind(b") ") + 2
    return text[place : place + 1]


def _page_tables(proc: int, place: str) -> int:
    _, _, rest = _read(proc, f"{place}/status").partition(b"\nVmPTE:")
    return int(rest.split(maxsplit=1)[0]) * 1024 if rest else 0


def parse_stat(text: bytes) -> ProcessUse | None:
    """Parse a process's `stat`; None if it is empty."""
    head, _, rest = text.rpartition(b") ")
    fields = rest.split()
    if len(fields) < 22:
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
        tables=int(fields[20]) // _MAPPED_PER_TABLE,
        mapped=int(fields[20]),
        forked=bool(int(fields[6]) & _FORKED),
    )


def private_and_shared(proc: int, process: ProcessUse) -> tuple[int, int]:
    """Return a process's private and shared memory in bytes.

    Private memory is freed when the process exits; pages in common with its relatives, and shared memory,
    count in proportion. Mapped files count as neither: the kernel reclaims them when needed. Page tables are
    private. A process that cannot be read counts with all its resident memory.
    """
    fields = dict.fromkeys((b"Pss_Anon:", b"Pss_Shmem:"), -1)
    text = _read(proc, f"{process.pid}/smaps_rollup") if process.readable else b""
    for line in text.splitlines():
        name, _, value = line.partition(b" ")
        if name in fields:
            fields[name] = int(value.split()[0]) * 1024
    private, shared = fields.values()
    if private < 0 or shared < 0:
        private, shared = process.memory, 0
    return private + process.tables + _mappings(proc, process) * _MAPPING_BYTES, shared


def _mappings(proc: int, process: ProcessUse) -> int:
    """Return the number of a process's mappings, or a larger one; 0 if there can be only few."""
    if process.mapped <= _SMALL_SPACE or not process.readable:
        return 0
    text = _read_all(proc, f"{process.pid}/maps", _FEW_MAPS_BYTES)
    return text.count("\n") if len(text) < _FEW_MAPS_BYTES else _MOST_MAPPINGS


def deleted_mappings(
    proc: int, found: Iterable[ProcessUse], in_memory: Collection[int], counted: Collection[int]
) -> int:
    """Return the bytes of unlinked files on disk that are mapped; each counts up to its last mapped byte.

    Args:
        in_memory: device numbers of file systems in memory.
        counted: inodes of files that are counted already.
    """
    ends: dict[tuple[str, str], int] = {}
    for process in found:
        for line in _read_all(proc, f"{process.pid}/maps").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) < 6 or not fields[5].endswith(" (deleted)") or int(fields[4]) in counted:
                continue
            if _device(fields[3]) not in in_memory:
                first, _, last = fields[0].partition("-")
                end = int(fields[2], 16) + int(last, 16) - int(first, 16)
                file = fields[3], fields[4]
                ends[file] = max(ends.get(file, 0), end)
    return sum(ends.values())


def _device(text: str) -> int:
    major, _, minor = text.partition(":")
    return os.makedev(int(major, 16), int(minor, 16))


class MemoryFiles:
    """The sandbox's own tmpfs mounts that it can write to, found before untrusted code runs in it.

    A tmpfs that this process sees too is left out, such as that of the workspace if the host has /tmp in
    memory: others have files there, and files of the workspace count as disk use.

    Args:
        first: host pid of its first process.
        root: host path of its root directory.
    """

    def __init__(self, first: int, root: str) -> None:
        self._root = root
        self._places: dict[str, int] = {}
        shared = {line.split(" ")[2] for line in proc_lines(Path("/proc/self/mountinfo"))}
        for line in proc_lines(Path(f"/proc/{first}/mountinfo")):
            before, _, after = line.partition(" - ")
            device, _, target, options = before.split(" ")[2:6]  # the device in decimal, unlike in maps
            if after.startswith("tmpfs ") and device not in shared and "rw" in options.split(","):
                with contextlib.suppress(OSError):
                    mounted = os.stat(f"{self._root}{target}").st_dev  # noqa: PTH116
                    if f"{os.major(mounted)}:{os.minor(mounted)}" == device:  # not mounted over
                        self._places[target] = mounted

    @property
    def devices(self) -> Collection[int]:
        """The device numbers of the mounts."""
        return self._places.values()

    def used(self) -> int:
        """Return the bytes in the mounts, with the kernel's own memory for each file."""
        total = 0
        for place, device in self._places.items():
            with contextlib.suppress(OSError):
                path = f"{self._root}{place}"
                with opened(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
                    if os.fstat(fd).st_dev == device:  # else the mount was replaced
                        status = os.fstatvfs(fd)
                        total += (status.f_blocks - status.f_bfree) * status.f_frsize
                        total += (status.f_files - status.f_ffree) * _INODE_BYTES
        return total


@dataclass(frozen=True, slots=True)
class MachineUse:
    """Use of the whole machine.

    Args:
        memory: bytes that are not available.
        tasks: processes and threads.
        kernel: bytes of unreclaimable kernel memory, such as that of descriptors and epoll watches.
    """

    memory: int
    tasks: int
    kernel: int = 0

    def __add__(self, other: "MachineUse") -> "MachineUse":
        return MachineUse(*map(add, self._fields(), other._fields()))

    def minimum(self, other: "MachineUse") -> "MachineUse":
        """Return the smaller value of each field."""
        return MachineUse(*map(min, self._fields(), other._fields()))

    def _fields(self) -> tuple[int, int, int]:
        return self.memory, self.tasks, self.kernel


def node_use() -> MachineUse:
    """Return the machine's current use. Takes some tens of microseconds."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    meminfo = {fields[0]: int(fields[1]) * 1024 for fields in lines}
    tasks = Path("/proc/loadavg").read_text().split()[3].partition("/")[2]
    used = meminfo["MemTotal:"] - meminfo["MemAvailable:"]
    return MachineUse(used, int(tasks), meminfo.get("SUnreclaim:", 0))


def kill(proc: int, process: ProcessUse) -> bool:
    """Kill `process` if it is still the measured one. Return True if it was.

    Its /proc directory serves as a pidfd: its pid in the sandbox cannot be used to kill it from here.
    """
    with (
        contextlib.suppress(OSError),
        opened(str(process.pid), os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc) as folder,
    ):
        now = parse_stat(_read(folder, "stat"))
        if now is not None and now.start == process.start:
            signal.pidfd_send_signal(folder, signal.SIGKILL)
            return True
    return False


def _read(folder: int, path: str) -> bytes:
    with contextlib.suppress(OSError), opened(path, dir_fd=folder) as fd:
        return os.read(fd, 4096)
    return b""  # it has exited meanwhile, or must not be read


def names(folder: int, path: str) -> list[str]:
    """Return the names in a directory. Raise OSError if it cannot be read."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder) as fd:
        return os.listdir(fd)  # noqa: PTH208


def _read_all(folder: int, path: str, limit: int = _MAPS_BYTES) -> str:
    try:
        with open(
            path, errors="replace", opener=lambda name, flags: os.open(name, flags, dir_fd=folder)
        ) as file:
            return file.read(limit)
    except OSError:  # it has exited meanwhile, or must not be read
        return ""
