"""Detection of memory shortage on the machine, or in the control group that bounds this process.

Files: /proc/meminfo; memory.pressure, memory.max, memory.current and memory.stat of control groups, version 2
(https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/accounting/psi.html).
"""

from collections.abc import Iterator
from pathlib import Path

#: Memory is short if less than this share of it is available.
SHARE = 0.05
#: Memory is short if some process waited for it for more than so many per cent of the last ten seconds.
WAITED = 10.0


def memory_is_short(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> bool:
    """Return True if memory is short now; takes some 0.1 ms. Missing figures count as not short.

    Args:
        proc, groups: the kernel's file systems.
    """
    machine = _numbers(proc / "meminfo")
    if machine.get("MemAvailable:", 1) < SHARE * machine.get("MemTotal:", 1):
        return True
    places = list(_own_groups(proc, groups))
    if any(_full(place) for place in places):
        return True
    pressures = [proc / "pressure" / "memory", *(place / "memory.pressure" for place in places[:1])]
    return any(_waited(path) > WAITED for path in pressures)


def _own_groups(proc: Path, groups: Path) -> Iterator[Path]:
    """Yield the control group of this process and its visible ancestors."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        if line.startswith("0::/"):
            place = groups / line[4:]
            while place.is_relative_to(groups):
                yield place
                place = place.parent


def _full(group: Path) -> bool:
    most = _text(group / "memory.max").strip()
    if not most.isdigit():  # "max", or no limit here
        return False
    used = _text(group / "memory.current").strip()
    # The kernel reclaims files that were not used lately before memory is short.
    idle = _numbers(group / "memory.stat").get("inactive_file", 0)
    return used.isdigit() and int(used) - idle > (1 - SHARE) * int(most)


def _waited(path: Path) -> float:
    """Return `some avg10` of a pressure file, in per cent."""
    for field in _text(path).partition("\n")[0].split():
        if field.startswith("avg10="):
            return float(field[6:])
    return 0.0


def _numbers(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
