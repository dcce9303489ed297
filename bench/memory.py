"""Memory of processes, as the kernel counts it."""

from dataclasses import dataclass
from pathlib import Path

#: Fields of /proc/meminfo: kernel memory for processes, namespaces, mounts and sockets.
KERNEL = ("Slab", "KernelStack", "PageTables", "SecPageTables", "Percpu")


@dataclass(frozen=True, slots=True)
class Memory:
    """Return the memory in use on the whole machine, in bytes."""

    kernel: int
    available: int

    @classmethod
    def now(cls) -> "Memory":
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
        return cls(sum(sizes.get(name, 0) for name in KERNEL), sizes["MemAvailable"])


def pss(pids: list[int]) -> int:
    """Return the bytes of all these processes; shared memory is divided among its users.

    Raises:
        PermissionError: a process is another user's. For everyone but root, that includes tool servers.
    """
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it exited
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total
