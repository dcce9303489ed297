"""What this process holds of the operating system, and what it still holds later.

For a fixture that wraps every test:

    before = Holdings.now(run_dir)
    ...
    assert not leaks_since(before, run_dir)
"""

import contextlib
import errno
import gc
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from prorl_envs.sandbox.program import NAME

#: PF_KTHREAD of <linux/sched.h>, among the flags of proc(5)'s stat.
_KERNEL_THREAD = 0x00200000
#: What makes sandboxes, which a driver keeps for the next that is alike.
_PROGRAM = f"/memfd:{NAME} (deleted)"
#: Number, and inode in /proc, of processes that can be none of ours: they are not read again. Another process
#: of that number has another inode.
_STRANGERS: set[tuple[str, int]] = set()


@dataclass(frozen=True, slots=True)
class Holdings:
    """A snapshot.

    Args:
        processes: pid with start time, and command, of the children of this process, of every process whose
            command names the run directory (bubblewrap), and of every process in a mount namespace that
            shows something below it (a sandbox's).
        descriptors: number, and what it refers to, of this process's open descriptors.
        mounts: the mounts below the run directory, in this process's namespace.
        directories: what lies in the run directory, where drivers keep their files.
    """

    processes: dict[tuple[int, int], str]
    descriptors: dict[tuple[int, str], str]
    mounts: dict[str, str]
    directories: dict[str, str]

    @classmethod
    def now(cls, run_dir: Path) -> Self:
        """Look around. `run_dir` is where the drivers under test make their directories."""
        return cls(
            _processes(run_dir), _descriptors(), _mounts(run_dir), {str(p): str(p) for p in run_dir.iterdir()}
        )


def leaks_since(before: Holdings, run_dir: Path, *, patience_s: float = 5.0) -> list[str]:
    """What is there now and was not `before`, one line each.

    What is about to end (a killed process, a descriptor held by a garbage cycle) gets `patience_s` seconds.
    """
    deadline = time.monotonic() + patience_s
    while True:
        leaks = _difference(before, Holdings.now(run_dir))
        if not leaks or time.monotonic() > deadline:
            return leaks
        with warnings.catch_warnings():
            # asyncio leaves the socket of a connection that is cancelled while it is made to the collector.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        time.sleep(0.01)


def _difference(before: Holdings, after: Holdings) -> list[str]:
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
        # Such a one has ended, or is another user's.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            command, _, rest = _read(pid, "stat").rpartition(b")")
            fields = rest.split()
            if int(fields[19]) < began or int(fields[6]) & _KERNEL_THREAD:
                _STRANGERS.add(known)  # it was there before us
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
        if error.errno == errno.EINVAL:  # it is ending, and its mounts are gone already
            return False
        raise


def _read(pid: str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        return file.readall()


def _descriptors() -> dict[tuple[int, str], str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the directory
            target = os.readlink(f"/proc/self/fd/{number}")
            if target != _PROGRAM:
                found[int(number), target] = ""
    return found


def _mounts(run_dir: Path) -> dict[str, str]:
    """Those on the run directory or below it: others on this machine mount what they like meanwhile."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line.split()[0]: line for line in lines if f"{line.split()[4]}/".startswith(f"{run_dir}/")}
