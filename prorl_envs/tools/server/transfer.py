"""Tool server of one transfer: packs or unpacks a tree with the sandbox's own rights, then exits.

Like `server.py`, it is forked warm and runs outside the sandbox's pid namespace. To cancel the transfer, the
host closes the socket.
"""

import errno
import os
import socket

from prorl_envs.errors import TransferRefused
from prorl_envs.sandbox.linux.descriptors import opened
from prorl_envs.tools.protocol.messages import WireError
from prorl_envs.tools.protocol.transfer import Failed, Message, Pack, TransferChannel, Unpack
from prorl_envs.tools.protocol.tree import Transferred, pack
from prorl_envs.tools.protocol.unpack import unpack


def serve(sock: socket.socket) -> None:
    """Execute one transfer. Entry point of a process that a template forks.

    Args:
        sock: connected stream socket; its peer is the host.

    Raises:
        WireError: the host broke the protocol.
    """
    sock.setblocking(True)
    channel = TransferChannel(sock)
    try:
        _transfer(channel, channel.receive())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the host has closed the connection


def _transfer(channel: TransferChannel, request: Message) -> None:
    try:
        match request:
            case Pack(path, limits, skip_unsupported):
                done = pack(_absolute(path), channel, limits, skip_unsupported=skip_unsupported)
            case Unpack(path, _):
                done = _unpack(channel, request, _absolute(path))
            case _:
                raise WireError(f"{type(request).__name__} is not a request")
    except (BrokenPipeError, ConnectionResetError):
        raise
    except OSError as error:
        channel.send(Failed(error.errno or errno.EIO, error.strerror or str(error)))
    except TransferRefused as refused:
        channel.send(Failed(0, refused.message))
    else:
        channel.send_end(done)


def _unpack(channel: TransferChannel, request: Unpack, path: str) -> Transferred:
    target = os.path.realpath(path)
    parent = os.path.dirname(target)  # noqa: PTH120
    os.makedirs(parent, exist_ok=True)  # noqa: PTH103
    with opened(parent, os.O_RDONLY | os.O_DIRECTORY) as folder:
        name = os.path.basename(target)  # noqa: PTH119
        done = unpack(channel, folder, name, request.limits, merge=True)
    channel.check_end(done)
    return done


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise OSError(errno.EINVAL, "is not an absolute path")
    return path
