"""What a template does that is the first process of a sandbox: see `instance.py`.

Elsewhere tool servers come from outside. Here they are born inside, in the pid namespace of what they run,
so they are protected by what the kernel gives every process: nobody traces or reads one that cannot be
dumped, and the first process of a namespace takes no signal from inside for which it has no handler.
"""

import contextlib
import errno
import os
import signal
import socket
import time

from prorl_envs.sandbox.join import offer_to_oom_killer
from prorl_envs.sandbox.route import add_own_default_route
from prorl_envs.sandbox.seccomp import install_filter
from prorl_envs.sandbox.syscalls import (
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    drop_capabilities,
    mount,
    prctl,
)

_NAMESPACES = ("pid", "mnt", "net", "ipc", "uts")
_MS_RDONLY, _MS_REMOUNT, _MS_BIND = 1, 32, 4096
_KEPT_FLAGS = {"nosuid": 2, "nodev": 4, "noexec": 8, "relatime": 1 << 21}
#: Seconds in which all other processes must be killed.
_KILL_S = 5.0

#: In a tool server, the way to the first process; None where that is another program.
_first: socket.socket | None = None


def become_first(*, route: bool) -> tuple[dict[str, object], list[int]]:
    """Raise what walls this process can raise, before anything else runs here.

    Args:
        route: whether to add a default route, which needs capabilities.

    Returns:
        What the host has to look at (this process's number and namespaces), and descriptors for it: one of
        this process, and one of its root directory, by which the host sees the sandbox's files and processes.

    Raises:
        OSError: the kernel refused; nothing hostile may run here.
    """
    found: dict[str, object] = {
        "pid": os.getpid(),
        "namespaces": {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in _NAMESPACES},  # noqa: PTH116
    }
    offer_to_oom_killer()
    if _has_capabilities():
        # Where root runs Apptainer: the kernel takes the user of such a sandbox for the owner of /proc/sys.
        for place in ("/proc", "/dev"):
            _make_read_only(place)
        if route:
            add_own_default_route()
        drop_capabilities()
    descriptors = [os.pidfd_open(os.getpid()), os.open("/", os.O_PATH | os.O_DIRECTORY)]
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    install_filter()
    prctl(PR_SET_DUMPABLE, 0)
    # Without a handler no signal from inside reaches it; Python sets one for this.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return found, descriptors


def serve_under(first: socket.socket) -> None:
    """Called in a tool server that was just forked: `first` leads to the first process."""
    global _first
    _first = first


def is_inside() -> bool:
    """Whether this process is a tool server in the pid namespace of what it runs."""
    return _first is not None


def end_others() -> None:
    """Have the first process kill every process but itself and the tool servers.

    Raises:
        OSError: new ones came faster than they could be killed.
    """
    assert _first is not None
    _first.send(b"end")
    if _first.recv(16) != b"ended":
        raise OSError(errno.EAGAIN, "the sandbox starts processes faster than they can be killed")


def end_all_but(spared: set[int]) -> bool:
    """Kill every process but this one and `spared`, in the first process. Returns whether none is left."""
    if os.getpid() != 1:  # "every process" would be everything this user runs
        return False
    deadline = time.monotonic() + _KILL_S
    while victims := [pid for pid in _processes() if pid not in spared and _lives(pid)]:
        # Stopped first, each in its turn, so that fewer are born while the others die.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if time.monotonic() > deadline:
            return False
    return True


def _processes() -> list[int]:
    names = os.listdir("/proc")  # noqa: PTH208 - the template imports no pathlib
    return [int(name) for name in names if name.isdigit() and int(name) != os.getpid()]


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return file.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _has_capabilities() -> bool:
    with open("/proc/self/status", "rb") as file:  # noqa: PTH123
        sets = [line.split()[1] for line in file if line.startswith(b"Cap")]
    return any(int(each, 16) for each in sets)


def _make_read_only(place: str) -> None:
    flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        for line in file:
            fields = line.split()
            if fields[4] == place:
                # What is locked on a mount must be said again, or the kernel refuses.
                flags |= sum(_KEPT_FLAGS.get(option, 0) for option in fields[5].split(","))
    mount("", place, "", flags)
