"""Memory of processes and of the machine, from the kernel's statistics."""

from dataclasses import dataclass
from pathlib import Path

#: Fields of /proc/meminfo: kernel memory for processes, namespaces, mounts and sockets.
KERNEL = ("Slab", "KernelStack", "PageTables", "SecPageTables", "Percpu")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the machine: memory of the kernel, and available memory, in bytes."""

    kernel: int
    available: int

    @classmethod
    def now(cls) -> "Memory":
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
        return cls(sum(sizes.get(name, 0) for name in KERNEL), sizes["MemAvailable"])


def pss(pids: list[int]) -> int:
    """Return the memory of the processes in bytes; shared memory is divided among its users.

    Raises:
        PermissionError: a process belongs to another user, or is a tool server, which only root may inspect.
    """
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # the process has exited
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total
