"""What processes cost in memory, as the kernel counts it."""

from dataclasses import dataclass
from pathlib import Path

#: Of /proc/meminfo: what the kernel keeps for processes, namespaces, mounts and sockets.
KERNEL = ("Slab", "KernelStack", "PageTables", "SecPageTables", "Percpu")


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the whole machine, in bytes."""

    kernel: int
    available: int

    @classmethod
    def now(cls) -> "Memory":
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
        return cls(sum(sizes.get(name, 0) for name in KERNEL), sizes["MemAvailable"])


def pss(pids: list[int]) -> int:
    """Bytes of all these processes, what several share divided among them.

    Raises:
        PermissionError: another user's; tool servers count as such for everyone but root.
    """
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total
