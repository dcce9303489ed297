"""Decisions about a sandbox's use of memory and processes. Pure: measurements in, decisions out."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

#: Fastest growth of a sandbox, in bytes and processes per second, for which the check interval is chosen.
MEMORY_GROWTH = 4 << 30
PROCESS_GROWTH = 4000
SHORTEST_S = 0.02
LONGEST_S = 2.0

_PRINTABLE = re.compile(r"[^\w.+-]")


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One process of a sandbox.

    Args:
        pid: its pid in the sandbox.
        parent: its parent's pid there; 0 if the parent is outside, as for processes of a tool server.
        start: start time in the kernel's ticks; distinguishes it from a later process with the same pid.
        threads: its number of threads.
        ticks: processor time in the kernel's ticks, including that of its exited children.
        memory: bytes, as far as they were measured.
        name: as the process set it: untrusted.
        tables: bytes of its page tables; at most so many if its address space is small.
        mapped: bytes of its address space; 0 while it exits.
        forked: whether it has started no program since it was forked.
        readable: whether this user may read its memory and descriptors.
    """

    pid: int
    parent: int
    start: int
    threads: int
    ticks: int
    memory: int
    name: str
    tables: int = 0
    mapped: int = 0
    forked: bool = False
    readable: bool = True


@dataclass(frozen=True, slots=True)
class Branch:
    """Processes that are killed together: a process and its descendants.

    Args:
        name: the top process's name, sanitised.
        processes: all of them.
        memory: bytes of all of them.
    """

    name: str
    processes: tuple[ProcessUse, ...]
    memory: int


def spared(processes: Iterable[ProcessUse], servers: Collection[int] = ()) -> set[int]:
    """Return the pids of the first process and of those that a tool server started: shells, Python sessions.

    Args:
        servers: tool servers among the processes; spared as well.
    """
    above = {0, *servers}
    return {process.pid for process in processes if process.pid == 1 or process.parent in above} | {*servers}


def branches(processes: Sequence[ProcessUse], servers: Collection[int] = ()) -> list[Branch]:
    """Return the branches that can be killed, heaviest first.

    A command is the child of a shell, an orphan the child of the first process: each is a branch, with its
    descendants. A shell counts with its own memory only, so it is killed only if it is the heaviest.
    """
    tops = spared(processes, servers)
    children: dict[int, list[ProcessUse]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found = []
    for process in processes:
        if process.pid in servers:
            continue
        if process.pid in tops and process.pid != 1:
            # Its children are killed with it, but are counted as branches of their own.
            found.append(Branch(harmless(process.name), _tree(process, children), process.memory))
        elif process.parent in tops:
            tree = _tree(process, children)
            found.append(Branch(harmless(process.name), tree, sum(member.memory for member in tree)))
    return sorted(found, key=lambda branch: branch.memory, reverse=True)


def to_kill(candidates: Iterable[Branch], excess: int) -> Iterator[Branch]:
    """Yield the heaviest branches, until they hold more than `excess` bytes."""
    gone: set[int] = set()
    for branch in candidates:
        if excess < 0:
            return
        if branch.processes[0].pid not in gone:
            yield branch
            excess -= sum(member.memory for member in branch.processes if member.pid not in gone)
            gone |= {member.pid for member in branch.processes}


def next_check_s(memory_left: int | None, processes_left: int | None, *, took_s: float) -> float:
    """Return the seconds until the next check: until a sandbox could reach a limit, within bounds.

    Args:
        memory_left: bytes up to its limit; None if memory is not checked.
        processes_left: processes up to its limit; None if they are not checked.
        took_s: duration of the last check; checks take a tenth of the time at most.
    """
    delays = [LONGEST_S]
    if memory_left is not None:
        delays.append(memory_left / MEMORY_GROWTH)
    if processes_left is not None:
        delays.append(max(processes_left / PROCESS_GROWTH, 0.25 if processes_left > 500 else 0.0))
    return max(SHORTEST_S, 10 * took_s, min(delays))


def killed_words(names: Sequence[str], processes: int) -> str:
    """Return a phrase such as `python3 was killed`, for one or several branches."""
    shown = ", ".join(dict.fromkeys(names[:5])) + (", ..." if len(set(names)) > 5 else "")
    count = f" ({processes} processes)" if processes > 1 else ""
    return f"{shown}{count} {'was' if processes == 1 else 'were'} killed"


def size_words(size: int) -> str:
    """Format a number of bytes for people."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} bytes"


def without(processes: Iterable[ProcessUse], dying: Collection[tuple[int, int]]) -> list[ProcessUse]:
    """Leave out processes that were killed already: their memory is being released."""
    return [process for process in processes if (process.pid, process.start) not in dying]


def _tree(top: ProcessUse, children: Mapping[int, Sequence[ProcessUse]]) -> tuple[ProcessUse, ...]:
    found: list[ProcessUse] = []
    pending = [top]
    seen = {top.pid}
    while pending:
        process = pending.pop()
        found.append(process)
        for child in children.get(process.pid, ()):
            if child.pid not in seen:  # /proc is not read atomically: a pid can occur twice
                seen.add(child.pid)
                pending.append(child)
    return tuple(found)


def harmless(name: str) -> str:
    """Return a process's name without characters that could disturb a terminal or a reader."""
    return _PRINTABLE.sub("?", name)[:15] or "?"
