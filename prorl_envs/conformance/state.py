"""Report on the state of a process: its resources, limits, privileges and view of the system.

Runs inside a sandbox, in each of the ways in which a process can start there (see `ways.py`): as a script, in
a Python session, in a Jupyter kernel, as the entry of a template. So it needs only the standard library.
`own_state` does not use `/proc`, because a tool server joins the sandbox's mounts but stays outside its pid
namespace.
"""

# Templates import no pathlib.
# ruff: noqa: PTH109, PTH115, PTH116, PTH123, PTH208

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import stat
import sys
import threading
from typing import Any

#: Module that a promise puts at a path where a tool server's import could find it.
PLANTED = "prorl_planted"

#: Kinds of file that a descriptor can refer to, by `st_mode`; terminals have these major numbers.
_KINDS = (
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISDIR, "directory"),
    (stat.S_ISREG, "file"),
)
_TERMINALS, _TTY, _NULL = range(136, 144), (5, 0), (1, 3)
_DESCRIPTORS = 4096
#: Name of ctypes' library, which from version 3.5 on keeps its own file open.
_LIBFFI = "libffi.so"

# Constants of the kernel; see prctl(2).
_PR_GET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_GET_SECCOMP = 2, 3, 21
_PR_CAPBSET_READ, _PR_GET_NO_NEW_PRIVS = 23, 39
_CAPABILITY_VERSION = 0x20080522
_LIMITS = {"core": resource.RLIMIT_CORE, "files": resource.RLIMIT_NOFILE}
_LIMITS.update(processes=resource.RLIMIT_NPROC, file_size=resource.RLIMIT_FSIZE)
_LIMITS.update(queues=resource.RLIMIT_MSGQUEUE, signals=resource.RLIMIT_SIGPENDING)
_LIMIT_ROWS = {"Max core file size": "core", "Max open files": "files", "Max processes": "processes"}
_LIMIT_ROWS.update({"Max file size": "file_size", "Max msgqueue size": "queues"})
_LIMIT_ROWS["Max pending signals"] = "signals"


def own_state() -> dict[str, Any]:
    """Return the state of this process, by system calls alone."""
    return {
        "directory": os.getcwd(),
        "mask": _mask(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "threads": threading.active_count(),
        "environment": dict(os.environ),
        "descriptors": {fd: kind for fd in range(_DESCRIPTORS) if (kind := _kind_of(fd))},
        "limits": {name: list(resource.getrlimit(kind)) for name, kind in _LIMITS.items()},
        "capabilities": _capabilities(),
        "no_new_privileges": _prctl(_PR_GET_NO_NEW_PRIVS),
        "filter": _prctl(_PR_GET_SECCOMP),
        "dumpable": _prctl(_PR_GET_DUMPABLE),
        "death_signal": _death_signal(),
        "ignored": [number for number in _signals() if signal.getsignal(number) is signal.SIG_IGN],
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "hostname": os.uname().nodename,
        "interfaces": [name for _, name in socket.if_nameindex()],
        "finders": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        "imports": _can_import(),
    }


def state_of(pid: str) -> dict[str, Any]:
    """Return the state of another process of this sandbox, or of this one, as `/proc` shows it."""
    with open(f"/proc/{pid}/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    sets = [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")]
    return {
        "directory": os.readlink(f"/proc/{pid}/cwd"),
        "mask": int(status["Umask"], 8),
        "threads": int(status["Threads"]),
        "descriptors": {
            int(fd): kind for fd in os.listdir(f"/proc/{pid}/fd") if (kind := _kind(f"/proc/{pid}/fd/{fd}"))
        },
        "limits": _limits_of(pid),
        "capabilities": sets,
        "no_new_privileges": int(status["NoNewPrivs"]),
        "filter": int(status["Seccomp"]),
        "ignored": _set(status["SigIgn"]),
        "blocked": _set(status["SigBlk"]),
        "initial_environment": _environment_of(pid),
        "out_of_memory": int(_read(f"/proc/{pid}/oom_score_adj")),
        "namespaces": {name: os.readlink(f"/proc/{pid}/ns/{name}") for name in os.listdir(f"/proc/{pid}/ns")},
    }


def write(path: str, pid: str = "self") -> None:
    """Write the state of a process to a file as JSON. Values that only a process itself can query are those
    of this process, which inherited them from the other one, its parent."""
    state = json.dumps({**own_state(), **state_of(pid)})
    with open(path, "w") as file:
        file.write(state)


def serve(sock: socket.socket) -> None:
    """Send the state of this process as JSON. Entry point into which a template forks."""
    with sock:
        sock.sendall(json.dumps(own_state()).encode())


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _environment_of(pid: str) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in _read(f"/proc/{pid}/environ").split("\0") if "=" in entry)


def _limits_of(pid: str) -> dict[str, list[int]]:
    found = {}
    for line in _read(f"/proc/{pid}/limits").splitlines():
        name = _LIMIT_ROWS.get(line[:26].strip())
        if name is not None:
            words = line[26:].split()[:2]
            found[name] = [resource.RLIM_INFINITY if word == "unlimited" else int(word) for word in words]
    return found


def _set(mask: str) -> list[int]:
    """Return the signals of a mask, without 32 and 33, which the C library reserves: no program can change
    their inherited state."""
    return [number for number in range(1, 65) if int(mask, 16) >> number - 1 & 1 and number not in (32, 33)]


def _signals() -> list[int]:
    return [int(number) for number in signal.valid_signals()]


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _kind_of(fd: int) -> str:
    try:
        return _kind(fd)
    except OSError:
        return ""


def _libffi() -> int:
    """Return the inode of the loaded libffi; 0 if none is loaded."""
    return next(
        (int(line.split()[4]) for line in _read("/proc/self/maps").splitlines() if _LIBFFI in line), 0
    )


def _kind(file: int | str) -> str:
    """Return the kind of file of a descriptor; "" if it is libffi's, or closed (it listed `/proc`)."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return ""
    if found.st_ino == _LIBFFI_INODE:
        return ""
    for test, kind in _KINDS:
        if test(found.st_mode):
            return kind
    if not stat.S_ISCHR(found.st_mode):
        return "other"
    device = os.major(found.st_rdev), os.minor(found.st_rdev)
    if device[0] in _TERMINALS or device == _TTY:
        return "terminal"
    return "null" if device == _NULL else "device"


def _prctl(option: int, argument: Any = 0) -> int:
    return int(ctypes.CDLL(None).prctl(option, argument, 0, 0, 0))


def _death_signal() -> int:
    number = ctypes.c_int()
    _prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


def _capabilities() -> list[int]:
    """Return the inheritable, permitted, effective and bounding set."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capget(header, data)
    effective, permitted, inheritable = (data[index] | data[index + 3] << 32 for index in range(3))
    bounding = sum(1 << number for number in range(64) if _prctl(_PR_CAPBSET_READ, number) == 1)
    return [inheritable, permitted, effective, bounding]


def _can_import() -> bool:
    try:
        importlib.import_module(PLANTED)
    except ImportError:
        return False
    return True


# Read at import, before a fork joins a sandbox whose /proc does not show it.
_LIBFFI_INODE = _libffi()

if __name__ == "__main__":
    write(*sys.argv[1:])
