"""Requests to the kernel's netlink interface: man 7 netlink, man 7 rtnetlink.

Imported by templates: independent of the host side.
"""

import os
import socket
import struct

NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
#: Flags of a request that creates something.
NEW = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL

_NLMSG_ERROR = 2
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_ERROR = struct.Struct("=i")


def attribute(kind: int, value: bytes) -> bytes:
    """Return one attribute of a request."""
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + b"\0" * (-length % 4)


def request(netlink: socket.socket, kind: int, flags: int, body: bytes) -> None:
    """Send a request and await its acknowledgement. Raises OSError if the kernel refused."""
    message = _HEADER.pack(_HEADER.size + len(body), kind, flags, 1, 0) + body
    # With an explicit address, the kernel checks the sender's privileges only, not those of the process in
    # the sandbox's namespaces that opened the socket.
    netlink.sendto(message, (0, 0))
    answer = netlink.recv(65536)
    _, kind, *_ = _HEADER.unpack_from(answer)
    (code,) = _ERROR.unpack_from(answer, _HEADER.size)
    if kind == _NLMSG_ERROR and code != 0:
        raise OSError(-code, os.strerror(-code))
