"""How many descriptors there are to be had, receiving some over a Unix socket, and what one is of."""

import array
import os
import resource
import socket

from prorl_envs.errors import SandboxError

_SIZE = array.array("i").itemsize
#: Descriptors that a process may have open, where the machine lets it: a sandbox takes about ten of them. Not
#: all that a machine may offer, for some programs look at each number there could be.
_MANY = 65_536
#: What tools need below.
_FEW = 1024
#: Kept for ending what there is: without any, not even a directory can be removed.
_RESERVE = 128


def allow_many() -> None:
    """Raise this process's own limit of descriptors, mostly 1,024, as far as anybody may: to the hard one.

    Raises:
        SandboxError: that is too low for a single sandbox.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = _MANY
    elif hard < _FEW:
        raise SandboxError(
            f"a process may open no more than {hard} files here; tools need {_FEW}",
            hint="raise the hard limit: `ulimit -Hn`, LimitNOFILE= of systemd",
        )
    if soft != resource.RLIM_INFINITY and soft < min(hard, _MANY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MANY), hard))


def check_room() -> None:
    """Raises SandboxError where a further sandbox would leave too few descriptors to end those there are."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        lowest = limit
    else:
        os.close(lowest)
    if limit != resource.RLIM_INFINITY and lowest > limit - _RESERVE:
        raise SandboxError(
            f"this process has nearly all of its {limit} descriptors open",
            hint="raise the hard limit (`ulimit -Hn`), or have fewer sandboxes at once (service.run)",
        )


def receive_descriptors(sock: socket.socket, size: int, count: int) -> tuple[bytes, list[int]]:
    """Receive one message with up to `count` descriptors, which no program started from here inherits.

    Not by `socket.recv_fds`: it forgets its flags (seen in Python 3.12), and so leaves them to be inherited.

    Returns:
        The bytes (empty at end of file) and the descriptors, which the caller owns.

    Raises:
        OSError: as `recvmsg` does.
    """
    descriptors = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_LEN(count * _SIZE), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % _SIZE])
    return data, list(descriptors)


def pid_of(pidfd: int) -> int:
    """The number, here, of the process behind `pidfd`; -1 where it has ended."""
    # Not by a text file object, which costs more than all else here.
    info = os.open(f"/proc/self/fdinfo/{pidfd}", os.O_RDONLY)
    try:
        _, _, behind = os.read(info, 4096).partition(b"\nPid:")
    finally:
        os.close(info)
    return int(behind.partition(b"\n")[0])
