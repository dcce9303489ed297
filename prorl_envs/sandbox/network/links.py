"""Links between the networks of two sandboxes: pairs of virtual Ethernet interfaces, made by netlink.

Each sandbox keeps its own network namespace. A link adds one interface to each, with which only these two
reach each other, as on a network without a gateway. The kernel removes the pair with either namespace.

The host's process makes the links: it may change all network namespaces of its own user's sandboxes (man 7
user_namespaces), and programs inside may change none. Messages: man 7 rtnetlink, man 4 veth.
"""

import errno
import fcntl
import os
import socket
import struct

from prorl_envs.errors import SandboxError

_SIOCGSKNS = 0x894C
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_EXCL, _NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
_NEW = _NLM_F_REQUEST | _NLM_F_ACK | _NLM_F_CREATE | _NLM_F_EXCL
_RTM_NEWLINK, _RTM_DELLINK, _RTM_NEWADDR = 16, 17, 20
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_NET_NS_FD = 3, 18, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFF_UP = 1

_NLMSGHDR = struct.Struct("=IHHII")
_IFINFOMSG = struct.Struct("=BxHiII")
_IFADDRMSG = struct.Struct("=BBBBI")
_RTATTR = struct.Struct("=HH")
_ERROR = struct.Struct("=i")
_LOOPBACK = 1


def add_address(netlink: socket.socket, own: str, *, peer: str = "", index: int = _LOOPBACK) -> None:
    """Give an interface an IPv4 address, from which the address `peer` is then reached.

    Args:
        netlink: netlink socket of the network namespace.
        index: number of the interface; the loopback interface by default, which needs no peer.

    Raises:
        OSError: the kernel refused.
    """
    header = _IFADDRMSG.pack(socket.AF_INET, 32, 0, 0, index)
    local = _attribute(_IFA_LOCAL, socket.inet_aton(own))
    address = _attribute(_IFA_ADDRESS, socket.inet_aton(peer or own))
    _request(netlink, _RTM_NEWADDR, _NEW, header + local + address)


def connect(first: socket.socket, second: socket.socket, addresses: tuple[str, str], index: int) -> None:
    """Link two network namespaces.

    Args:
        first, second: netlink sockets of the namespaces.
        addresses: address of each side.
        index: number of the new interface in both namespaces, used by no other interface there.

    Raises:
        SandboxError: the kernel has no virtual Ethernet interfaces.
        OSError: the kernel refused.
    """
    netns = fcntl.ioctl(second, _SIOCGSKNS)
    name = _attribute(_IFLA_IFNAME, f"link{index}\0".encode())
    try:
        other = _interface(index) + name + _attribute(_IFLA_NET_NS_FD, _ERROR.pack(netns))
        pair = _attribute(_IFLA_INFO_DATA, _attribute(_VETH_INFO_PEER, other))
        kind = _attribute(_IFLA_LINKINFO, _attribute(_IFLA_INFO_KIND, b"veth\0") + pair)
        _request(first, _RTM_NEWLINK, _NEW, _interface(index) + name + kind)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        hint = "ask the administrator to load the kernel module veth"
        raise SandboxError("this machine cannot connect sandboxes", hint=hint) from error
    finally:
        os.close(netns)
    for netlink, (own, peer) in ((first, addresses), (second, addresses[::-1])):
        add_address(netlink, own, peer=peer, index=index)
        _request(netlink, _RTM_NEWLINK, _NLM_F_REQUEST | _NLM_F_ACK, _interface(index, _IFF_UP))


def disconnect(netlink: socket.socket, index: int) -> None:
    """Remove a link, if it still exists.

    Raises:
        OSError: the kernel refused.
    """
    try:
        _request(netlink, _RTM_DELLINK, _NLM_F_REQUEST | _NLM_F_ACK, _interface(index))
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise


def _interface(index: int, flags: int = 0) -> bytes:
    return _IFINFOMSG.pack(socket.AF_UNSPEC, 0, index, flags, flags)


def _attribute(kind: int, value: bytes) -> bytes:
    length = _RTATTR.size + len(value)
    return _RTATTR.pack(length, kind) + value + b"\0" * (-length % 4)


def _request(netlink: socket.socket, kind: int, flags: int, body: bytes) -> None:
    message = _NLMSGHDR.pack(_NLMSGHDR.size + len(body), kind, flags, 1, 0) + body
    # With an explicit address, the kernel checks the sender's privileges only, not those of the process in
    # the sandbox's namespaces that opened the socket.
    netlink.sendto(message, (0, 0))
    answer = netlink.recv(65536)
    (code,) = _ERROR.unpack_from(answer, _NLMSGHDR.size)
    if code != 0:
        raise OSError(-code, os.strerror(-code))
