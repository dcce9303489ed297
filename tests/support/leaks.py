"""Detection of leaked operating system resources of this process.

For a fixture that wraps every test:

    before = OpenResources.now(run_dir)
    ...
    assert not leaks_since(before, run_dir)
"""

import contextlib
import errno
import gc
import os
import signal
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

#: PF_KTHREAD of <linux/sched.h>, among the flags of proc(5)'s stat.
_KERNEL_THREAD = 0x00200000
#: Pid, and inode in /proc, of processes that cannot be ours: they are not read again. Another process with
#: that pid has another inode.
_STRANGERS: set[tuple[str, int]] = set()


@dataclass(frozen=True, slots=True)
class OpenResources:
    """Snapshot of the open resources.

    Args:
        processes: pid with start time, and command, of the children of this process, of every process whose
            command names the run directory (bubblewrap), and of every process in a mount namespace with a
            mount below it (a sandbox's).
        descriptors: target of each open descriptor of this process, with an index among those of the same
            target; and its number. The number is not part of the key, because shared drivers may replace a
            descriptor by one of the same kind at another number.
        mounts: the mounts below the run directory, in this process's namespace.
        directories: contents of the run directory, where drivers keep their files.
    """

    processes: dict[tuple[int, int], str]
    descriptors: dict[tuple[str, int], str]
    mounts: dict[str, str]
    directories: dict[str, str]

    @classmethod
    def now(cls, run_dir: Path) -> Self:
        """Take a snapshot. `run_dir` is where the drivers under test create their directories."""
        return cls(
            _processes(run_dir), _descriptors(), _mounts(run_dir), {str(p): str(p) for p in run_dir.iterdir()}
        )


def end_processes_since(before: OpenResources, run_dir: Path) -> None:
    """Kill the processes that exist now and did not exist `before`."""
    for pid, _ in _processes(run_dir).keys() - before.processes.keys():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def leaks_since(before: OpenResources, run_dir: Path, *, patience_s: float = 5.0) -> list[str]:
    """Return the resources that exist now and did not exist `before`, one line each.

    Resources that disappear soon (a killed process, a descriptor held by a garbage cycle) get `patience_s`
    seconds.
    """
    deadline = time.monotonic() + patience_s
    while True:
        leaks = _difference(before, OpenResources.now(run_dir))
        if not leaks or time.monotonic() > deadline:
            return leaks
        with warnings.catch_warnings():
            # If a connection is cancelled while it is created, asyncio leaves its socket to the garbage
            # collector.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        time.sleep(0.01)


def _difference(before: OpenResources, after: OpenResources) -> list[str]:
    kinds = (
        ("process", before.processes, after.processes),
        ("descriptor", before.descriptors, after.descriptors),
        ("mount", before.mounts, after.mounts),
        ("directory", before.directories, after.directories),
    )
    return [
        f"{kind} {key}: {text}" for kind, old, new in kinds for key, text in new.items() if key not in old
    ]


def _processes(run_dir: Path) -> dict[tuple[int, int], str]:
    found = {}
    namespace, own, name = os.readlink("/proc/self/ns/mnt"), os.getpid(), os.fsencode(run_dir)
    began = int(_read("self", "stat").rpartition(b")")[2].split()[19])
    for entry in os.scandir("/proc"):
        pid, known = entry.name, (entry.name, entry.inode())
        if not pid.isdigit() or int(pid) == own or known in _STRANGERS:
            continue
        # The process has exited, or belongs to another user.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            command, _, rest = _read(pid, "stat").rpartition(b")")
            fields = rest.split()
            if int(fields[19]) < began or int(fields[6]) & _KERNEL_THREAD:
                _STRANGERS.add(known)  # it existed before this process
                continue
            arguments = _read(pid, "cmdline")
            # bubblewrap names the directory before it has mounted anything
            if int(fields[1]) == own or name in arguments or _sandboxed(pid, namespace, name):
                text = f"{command.decode(errors='replace')}) {arguments[:200].decode(errors='replace')}"
                found[int(pid), int(fields[19])] = text.replace("\0", " ")
    return found


def _sandboxed(pid: str, namespace: str, run_dir: bytes) -> bool:
    if os.readlink(f"/proc/{pid}/ns/mnt") == namespace:
        return False
    try:
        return run_dir in _read(pid, "mountinfo")
    except OSError as error:
        if error.errno == errno.EINVAL:  # the process is exiting, and its mounts are gone already
            return False
        raise


def _read(pid: str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        return file.readall()


def _descriptors() -> dict[tuple[str, int], str]:
    found: dict[tuple[str, int], str] = {}
    seen: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor that listed the directory
            target = os.readlink(f"/proc/self/fd/{number}")
            found[target, seen[target]] = number
            seen[target] += 1
    return found


def _mounts(run_dir: Path) -> dict[str, str]:
    """Return the mounts on the run directory or below it, because other programs may mount meanwhile."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split()[0]: line for line in lines if f"{line.split()[4]}/".startswith(f"{run_dir}/")}
