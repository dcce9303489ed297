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
from prorl_envs.sandbox.linux.netlink import NEW, NLM_F_ACK, NLM_F_REQUEST, attribute, request

_SIOCGSKNS = 0x894C
_RTM_NEWLINK, _RTM_DELLINK, _RTM_NEWADDR = 16, 17, 20
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_NET_NS_FD = 3, 18, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFF_UP = 1

_IFINFOMSG = struct.Struct("=BxHiII")
_IFADDRMSG = struct.Struct("=BBBBI")
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
    local = attribute(_IFA_LOCAL, socket.inet_aton(own))
    address = attribute(_IFA_ADDRESS, socket.inet_aton(peer or own))
    request(netlink, _RTM_NEWADDR, NEW, header + local + address)


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
    name = attribute(_IFLA_IFNAME, f"link{index}\0".encode())
    try:
        other = _interface(index) + name + attribute(_IFLA_NET_NS_FD, struct.pack("=i", netns))
        pair = attribute(_IFLA_INFO_DATA, attribute(_VETH_INFO_PEER, other))
        kind = attribute(_IFLA_LINKINFO, attribute(_IFLA_INFO_KIND, b"veth\0") + pair)
        request(first, _RTM_NEWLINK, NEW, _interface(index) + name + kind)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        hint = "ask the administrator to load the kernel module veth"
        raise SandboxError("this machine cannot connect sandboxes", hint=hint) from error
    finally:
        os.close(netns)
    for netlink, (own, peer) in ((first, addresses), (second, addresses[::-1])):
        add_address(netlink, own, peer=peer, index=index)
        request(netlink, _RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, _interface(index, _IFF_UP))


def disconnect(netlink: socket.socket, index: int) -> None:
    """Remove a link, if it still exists.

    Raises:
        OSError: the kernel refused.
    """
    try:
        request(netlink, _RTM_DELLINK, NLM_F_REQUEST | NLM_F_ACK, _interface(index))
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise


def _interface(index: int, flags: int = 0) -> bytes:
    return _IFINFOMSG.pack(socket.AF_UNSPEC, 0, index, flags, flags)
