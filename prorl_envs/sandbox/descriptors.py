"""Receiving descriptors over a Unix socket."""

import array
import socket

_SIZE = array.array("i").itemsize


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
