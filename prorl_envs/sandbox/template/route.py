"""Changes to a sandbox's network from outside: new sockets in it, and a default route on its
loopback interface, by netlink.

Without a route, a connection to an outside address fails at once ("network is unreachable"); with this one it
times out, as on a network whose firewall drops it. Some test suites need a timeout.
"""

import errno
import os
import socket
import struct

from prorl_envs.sandbox.linux.kernel_settings import enter_owner_of
from prorl_envs.sandbox.linux.netlink import NEW, attribute, request

_RTM_NEWROUTE = 24
_RTA_OIF = 4
_RT_TABLE_MAIN, _RTPROT_BOOT, _RTN_UNICAST = 254, 3, 1
_RT_SCOPE_UNIVERSE, _RT_SCOPE_LINK = 0, 253

_RTMSG = struct.Struct("=BBBBBBBBI")


def add_default_route(netns: int) -> None:
    """Enter the network namespace `netns` (a descriptor) and route everything to its loopback interface.

    For a single-threaded process that does nothing else afterwards. The network namespace belongs to a user
    namespace above that of the sandbox's processes, so only a process from outside may change it.

    Raises:
        OSError: the kernel refused.
    """
    _enter(netns)
    add_own_default_route()


def add_own_default_route() -> None:
    """Route everything to the loopback interface of this process's own network namespace, if permitted.

    Raises:
        OSError: the kernel refused.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        loopback = socket.if_nametoindex("lo")
        _add_route(netlink, socket.AF_INET, loopback)
        try:
            _add_route(netlink, socket.AF_INET6, loopback)
        except OSError as error:
            # the errors of a host without IPv6
            if error.errno not in (errno.EAFNOSUPPORT, errno.EOPNOTSUPP, errno.EACCES):
                raise


def socket_inside(netns: int | None, *, netlink: bool = False) -> socket.socket:
    """Enter the network namespace `netns` (a descriptor) and return a new IPv4 stream or netlink socket.

    None means the namespace of this process. The socket stays in that namespace, whichever process uses it.
    Like `add_default_route`, only for a process that does nothing else afterwards.

    Raises:
        OSError: the kernel refused.
    """
    if netns is not None:
        _enter(netns)
    if netlink:
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def _enter(netns: int) -> None:
    enter_owner_of(netns)
    os.setns(netns, os.CLONE_NEWNET)


def _add_route(netlink: socket.socket, family: int, interface: int) -> None:
    scope = _RT_SCOPE_LINK if family == socket.AF_INET else _RT_SCOPE_UNIVERSE
    route = _RTMSG.pack(family, 0, 0, 0, _RT_TABLE_MAIN, _RTPROT_BOOT, scope, _RTN_UNICAST, 0)
    request(netlink, _RTM_NEWROUTE, NEW, route + attribute(_RTA_OIF, struct.pack("=I", interface)))
