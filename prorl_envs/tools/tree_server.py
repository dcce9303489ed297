"""The tool server of one transfer: packs or unpacks a tree with the sandbox's own rights, and ends.

Like `server.py` it runs outside the sandbox's pid namespace, forked warm; the host cancels by closing.
"""

import errno
import os
import socket

from prorl_envs.errors import TransferRefused
from prorl_envs.tools.tree import Transferred, pack
from prorl_envs.tools.tree_wire import Channel, Failed, Message, Pack, Unpack
from prorl_envs.tools.unpack import unpack
from prorl_envs.tools.wire import WireError


def serve(sock: socket.socket) -> None:
    """Carry out one transfer. The entry point a template forks into.

    Args:
        sock: connected stream socket; its other end is the host's.

    Raises:
        WireError: the host broke the protocol.
    """
    sock.setblocking(True)
    channel = Channel(sock)
    try:
        _transfer(channel, channel.receive())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the host has given up


def _transfer(channel: Channel, request: Message) -> None:
    try:
        match request:
            case Pack(path, limits, leave_out):
                done = pack(_absolute(path), channel, limits, leave_out=leave_out)
            case Unpack(path, _):
                done = _unpack(channel, request, _absolute(path))
            case _:
                raise WireError(f"{type(request).__name__} is no request")
    except (BrokenPipeError, ConnectionResetError):
        raise
    except OSError as error:
        channel.send(Failed(error.errno or errno.EIO, error.strerror or str(error)))
    except TransferRefused as refused:
        channel.send(Failed(0, refused.message))
    else:
        channel.send_end(done)


def _unpack(channel: Channel, request: Unpack, path: str) -> Transferred:
    target = os.path.realpath(path)
    parent = os.path.dirname(target)  # noqa: PTH120
    os.makedirs(parent, exist_ok=True)  # noqa: PTH103
    folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        name = os.path.basename(target)  # noqa: PTH119
        done = unpack(channel, folder, name, request.limits, merge=True)
    finally:
        os.close(folder)
    channel.check_end(done)
    return done


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise OSError(errno.EINVAL, "is not an absolute path")
    return path
