"""Template as the first process of a sandbox: see `drivers/instance/driver.py`.

With the other drivers, tool servers enter from outside. With this driver they are forked inside, in the pid
namespace of the programs that they run, so only general rules of the kernel protect them: no process can
trace or read one that is not dumpable, and the first process of a namespace receives no signal from inside
for which it has no handler.
"""

import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Sequence

from prorl_envs.sandbox.linux.descriptors import opened
from prorl_envs.sandbox.linux.kernel_settings import (
    Setting,
    limit_terminals,
    make_read_only,
    make_writable,
    protect_devices,
    write_settings,
)
from prorl_envs.sandbox.linux.seccomp import install_filter
from prorl_envs.sandbox.linux.syscall_wrappers import (
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    drop_capabilities,
    prctl,
)
from prorl_envs.sandbox.template.enter import offer_to_oom_killer
from prorl_envs.sandbox.template.route import add_own_default_route

_NAMESPACES = ("pid", "mnt", "net", "ipc", "uts")
#: Content of /proc/self/uid_map in the host's own user namespace.
_EVERY_USER = [b"0", b"0", b"4294967295"]
#: Seconds in which all other processes must be killed.
_KILL_S = 5.0

#: In a tool server, its socket to the first process; None if the first process is another program.
_init_socket: socket.socket | None = None


def become_init(*, route: bool, settings: Sequence[Setting]) -> tuple[dict[str, object], list[int]]:
    """Apply all isolation that this process can, before anything else runs in the sandbox.

    All arguments need capabilities, which the process has only if root runs Apptainer.

    Args:
        route: whether to add a default route.
        settings: settings of the sandbox's namespaces.

    Returns:
        Data for the host to check (this process's pid and namespaces), and two descriptors for the host: of
        this process, and of its root directory, which shows the host the sandbox's files and processes.

    Raises:
        OSError: the kernel refused; nothing hostile may run here.
    """
    found: dict[str, object] = {
        "pid": os.getpid(),
        "namespaces": {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in _NAMESPACES},  # noqa: PTH116
    }
    offer_to_oom_killer()
    if _has_capabilities():
        _limit_namespaces(settings)
        limit_terminals()
        protect_devices()
        # If root runs Apptainer, the kernel lets the sandbox's user write the files in /proc/sys.
        for place in ("/proc", "/dev"):
            make_read_only(place)
        if route:
            add_own_default_route()
        drop_capabilities()
    descriptors = [os.pidfd_open(os.getpid()), os.open("/", os.O_PATH | os.O_DIRECTORY)]
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    install_filter()
    prctl(PR_SET_DUMPABLE, 0)
    # A signal from inside reaches this process only if it has a handler, as Python sets for SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return found, descriptors


def set_init_socket(sock: socket.socket) -> None:
    """Set the socket to the first process, in a tool server that was just forked."""
    global _init_socket
    _init_socket = sock


def is_inside() -> bool:
    """Return whether this process is a tool server in the pid namespace of the programs that it runs."""
    return _init_socket is not None


def kill_others() -> None:
    """Make the first process kill every process but itself and the tool servers.

    Raises:
        OSError: new processes started faster than they could be killed.
    """
    assert _init_socket is not None
    _init_socket.send(b"end")
    if _init_socket.recv(16) != b"ended":
        raise OSError(errno.EAGAIN, "the sandbox starts processes faster than they can be killed")


def kill_all_but(spared: set[int]) -> bool:
    """Kill every process but this one and `spared`, in the first process. Return whether all are killed."""
    if os.getpid() != 1:  # outside a pid namespace, this would kill all processes of this user
        return False
    deadline = time.monotonic() + _KILL_S
    while victims := [pid for pid in processes() if pid not in spared and lives(pid)]:
        # Stop all of them first, so that fewer new processes start while the others die.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if time.monotonic() > deadline:
            return False
    return True


def processes() -> list[int]:
    """Return the processes of this /proc, without this process."""
    names = os.listdir("/proc")  # noqa: PTH208 - the template imports no pathlib
    return [int(name) for name in names if name.isdigit() and int(name) != os.getpid()]


def lives(pid: int) -> bool:
    """Return whether a process of this /proc exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return file.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _has_capabilities() -> bool:
    with open("/proc/self/status", "rb") as file:  # noqa: PTH123
        sets = [line.split()[1] for line in file if line.startswith(b"Cap")]
    return any(int(mask, 16) for mask in sets)


def _limit_namespaces(settings: Sequence[Setting]) -> None:
    with open("/proc/self/uid_map", "rb") as file:  # noqa: PTH123 - the template imports no pathlib
        shares_users = file.read().split() == _EVERY_USER
    # Without a separate user namespace, settings of the user namespace would change the host's.
    separate = [(path, value) for path, value in settings if not (shares_users and path.startswith("user/"))]
    make_writable("/proc/sys")
    try:
        with opened("/proc", os.O_PATH | os.O_DIRECTORY) as proc:
            write_settings(separate, proc)
    finally:
        make_read_only("/proc/sys")
