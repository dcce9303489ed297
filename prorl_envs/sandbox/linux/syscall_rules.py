"""System calls that sandboxed programs may not make, and the kernel's numbers for them.

This is a list of refusals, not of permissions: agents run arbitrary programs. A call is refused if no task
needs it and it reaches kernel code with a long record of faults, or a resource that the kernel counts for
the whole machine or the whole user, so that one sandbox could take it from all others.
"""

import errno
from dataclasses import dataclass, field

# Address families, and protocols of three of them.
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_INTERNET = (_AF_INET, _AF_INET6)
_SOCK_STREAM, _SOCK_DGRAM, _SOCK_RAW, _SOCK_TYPE_MASK = 1, 2, 3, 0xF
_IPPROTO_IP, _IPPROTO_ICMP, _IPPROTO_TCP, _IPPROTO_UDP, _IPPROTO_ICMPV6 = 0, 1, 6, 17, 58
_NETLINK_ROUTE, _NETLINK_SOCK_DIAG = 0, 4

_CLONE_NEWUSER = 0x10000000
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423
_F_SETLEASE, _F_NOTIFY, _F_SETDELEG = 1024, 1026, 1040
_F_OFD_LOCKS = (36, 37, 38)
_F_SETPIPE_SZ = 1031


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition that an argument has one of these values."""

    argument: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Refusal of a call because of one argument.

    Args:
        argument: its index.
        code: the error number returned.
        mask: bits of the argument that are compared; all by default.
        any_bit: refused if one of these bits is set.
        values: refused if the argument is one of these.
        allowed: refused if the argument is none of these; empty allows every value.
        only_if: the rule applies only under this condition.
    """

    argument: int
    code: int
    mask: int = 0xFFFFFFFF
    any_bit: int = 0
    values: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    only_if: Condition | None = None


#: Rare address families have a long record of faults; vsock reaches the hypervisor and has no network
#: namespace; packet sockets need a capability that nothing inside has. Of Internet sockets, SCTP, DCCP,
#: MPTCP, SMC and the like are large, rarely used parts of the kernel, some loaded on first use; programs fall
#: back to TCP. Netlink keeps routing (name lookups, `ip`) and socket listings (`ss`); libaudit and others
#: treat the refusal like a kernel without the family.
_SOCKET_RULES = (
    Rule(argument=0, code=errno.EAFNOSUPPORT, allowed=(_AF_UNIX, *_INTERNET, _AF_NETLINK)),
    Rule(
        argument=1,
        code=errno.ESOCKTNOSUPPORT,
        mask=_SOCK_TYPE_MASK,
        allowed=(_SOCK_STREAM, _SOCK_DGRAM, _SOCK_RAW),
        only_if=Condition(0, _INTERNET),
    ),
    Rule(
        argument=2,
        code=errno.EPROTONOSUPPORT,
        allowed=(_IPPROTO_IP, _IPPROTO_ICMP, _IPPROTO_TCP, _IPPROTO_UDP, _IPPROTO_ICMPV6),
        only_if=Condition(0, _INTERNET),
    ),
    Rule(
        argument=2,
        code=errno.EPROTONOSUPPORT,
        allowed=(_NETLINK_ROUTE, _NETLINK_SOCK_DIAG),
        only_if=Condition(0, (_AF_NETLINK,)),
    ),
)
_NO_USER_NAMESPACE = Rule(argument=0, code=errno.EPERM, any_bit=_CLONE_NEWUSER)

BY_ARGUMENT: dict[str, tuple[Rule, ...]] = {
    # A user namespace gives access to kernel code that needs capabilities. Not all drivers can forbid it.
    "clone": (_NO_USER_NAMESPACE,),
    "unshare": (_NO_USER_NAMESPACE,),
    # A command could escape by typing into its terminal. Line disciplines other than the default are drivers
    # of modems and networks, loaded on first use.
    "ioctl": (Rule(argument=1, code=errno.EPERM, values=(_TIOCSTI, _TIOCLINUX, _TIOCSETD)),),
    "socket": _SOCKET_RULES,
    "socketpair": _SOCKET_RULES,
    # A lease on a file of a read-only mount makes the host's own open() of it wait for 45 seconds. EINVAL is
    # the kernel's answer for files without leases. Locks of open files, which few programs use, belong to no
    # process, so that nothing shows how many a sandbox has. A larger pipe takes the share of up to 16 others,
    # since the kernel counts pages per user, and nothing shows its size. EPERM is the answer above the limit.
    "fcntl": (
        Rule(argument=1, code=errno.EPERM, values=(_F_SETPIPE_SZ,)),
        Rule(argument=1, code=errno.EINVAL, values=(_F_SETLEASE, _F_NOTIFY, _F_SETDELEG, *_F_OFD_LOCKS)),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Kernel numbers of one architecture.

    Args:
        audit: the architecture's identifier in the filter's input.
        seccomp: number of the seccomp call.
        refused: numbers of calls refused with EPERM.
        absent: numbers of calls refused with ENOSYS, after which programs fall back to others.
        by_argument: numbers of the calls in `BY_ARGUMENT`.
        emulated: numbers of the calls that report success to an emulated root and have no effect: its sandbox
            has only one user, so that no file can change its owner and no process its user. Calls that set
            attributes are among them because rpm sets file capabilities.
        emulated_devices: numbers of the calls that create files, and index of their mode argument; they
            report success for devices.
    """

    audit: int
    seccomp: int
    refused: dict[str, int]
    absent: dict[str, int]
    by_argument: dict[str, int] = field(default_factory=dict)
    emulated: dict[str, int] = field(default_factory=dict)
    emulated_devices: dict[str, tuple[int, int]] = field(default_factory=dict)


# These calls have the same numbers on every architecture.
_ABSENT_EVERYWHERE = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    # Its flags are in memory, which no filter can read; every libc falls back to `clone`.
    "clone3": 435,
    # Its pages are in no process's resident memory, so the watchdog would not count them. Nor would it count
    # those that `vmsplice` puts into pipes, where one byte holds a huge page.
    "memfd_secret": 447,
}

ARCHITECTURES = {
    "x86_64": Architecture(
        audit=0xC000003E,
        seccomp=317,
        refused={
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "kexec_load": 246,
            "kexec_file_load": 320,
            "init_module": 175,
            "finit_module": 313,
            "delete_module": 176,
            "perf_event_open": 298,
            "bpf": 321,
            "userfaultfd": 323,
            "syslog": 103,
            "open_by_handle_at": 304,
            # The quota of the host's user on the host's disks.
            "quotactl": 179,
            "quotactl_fd": 443,
        },
        absent={
            **_ABSENT_EVERYWHERE,
            # `fs.aio-max-nr` is one number for the whole machine. Databases fall back to threads.
            "io_setup": 206,
            # Groups and marks are counted per user, and it reports accesses by all processes to a mount.
            "fanotify_init": 300,
            # 16-bit segments, with a long record of faults.
            "modify_ldt": 154,
            "vmsplice": 278,
        },
        by_argument={
            "clone": 56,
            "unshare": 272,
            "ioctl": 16,
            "socket": 41,
            "socketpair": 53,
            "fcntl": 72,
        },
        emulated={
            "chown": 92,
            "fchown": 93,
            "lchown": 94,
            "fchownat": 260,
            "setuid": 105,
            "setgid": 106,
            "setreuid": 113,
            "setregid": 114,
            "setgroups": 116,
            "setresuid": 117,
            "setresgid": 119,
            "setfsuid": 122,
            "setfsgid": 123,
            "capset": 126,
            "setxattr": 188,
            "lsetxattr": 189,
            "fsetxattr": 190,
            "setxattrat": 463,
        },
        emulated_devices={"mknod": (133, 1), "mknodat": (259, 2)},
    ),
    "aarch64": Architecture(
        audit=0xC00000B7,
        seccomp=277,
        refused={
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "kexec_load": 104,
            "kexec_file_load": 294,
            "init_module": 105,
            "finit_module": 273,
            "delete_module": 106,
            "perf_event_open": 241,
            "bpf": 280,
            "userfaultfd": 282,
            "syslog": 116,
            "open_by_handle_at": 265,
            "quotactl": 60,
            "quotactl_fd": 443,
        },
        absent={**_ABSENT_EVERYWHERE, "io_setup": 0, "fanotify_init": 262, "vmsplice": 75},
        by_argument={
            "clone": 220,
            "unshare": 97,
            "ioctl": 29,
            "socket": 198,
            "socketpair": 199,
            "fcntl": 25,
        },
        emulated={
            "fchownat": 54,
            "fchown": 55,
            "setuid": 146,
            "setgid": 144,
            "setreuid": 145,
            "setregid": 143,
            "setgroups": 159,
            "setresuid": 147,
            "setresgid": 149,
            "setfsuid": 151,
            "setfsgid": 152,
            "capset": 91,
            "setxattr": 5,
            "lsetxattr": 6,
            "fsetxattr": 7,
            "setxattrat": 463,
        },
        emulated_devices={"mknodat": (33, 2)},
    ),
}
