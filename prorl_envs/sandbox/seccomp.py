"""A system call filter for what runs in a sandbox: parts of the kernel that no task needs and that have no
namespace, or a long record of faults, are closed.

A short list of refusals, not a list of what is allowed: agents run whatever programs there are. Numbers are
from the kernel's tables, for the two architectures bubblewrap's wheel is built for.
"""

import ctypes
import errno
import functools
import os
import struct
from dataclasses import dataclass

from prorl_envs.sandbox.syscalls import syscall


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one machine's kernel numbers things.

    Args:
        audit: the architecture's mark in the filter's input.
        seccomp: number of the seccomp call.
        refused: numbers of calls refused with EPERM.
        absent: numbers of calls refused with ENOSYS, upon which programs fall back to others.
        by_argument: numbers of calls that `BY_ARGUMENT` refuses in part.
    """

    audit: int
    seccomp: int
    refused: dict[str, int]
    absent: dict[str, int]
    by_argument: dict[str, int]


@dataclass(frozen=True, slots=True)
class Rule:
    """Refuses a call by one of its arguments.

    Args:
        argument: its index.
        code: the error.
        bits: refused where the argument has one of these bits.
        values: refused where it is one of these.
        others: refused where it is none of these.
    """

    argument: int
    code: int
    bits: int = 0
    values: tuple[int, ...] = ()
    others: tuple[int, ...] = ()


_CLONE_NEWUSER = 0x10000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK, _AF_PACKET = 1, 2, 10, 16, 17

#: A user namespace gives back every capability against the kernel's own code, and not every driver can
#: forbid it otherwise. Typing into a terminal is how a command gets out of one. Of the address families, the
#: rare ones have a long record of faults; vsock leads to the hypervisor and knows no network namespace.
BY_ARGUMENT = {
    "clone": Rule(0, errno.EPERM, bits=_CLONE_NEWUSER),
    "unshare": Rule(0, errno.EPERM, bits=_CLONE_NEWUSER),
    "ioctl": Rule(1, errno.EPERM, values=(_TIOCSTI, _TIOCLINUX)),
    "socket": Rule(0, errno.EAFNOSUPPORT, others=(_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK, _AF_PACKET)),
}


# The same numbers everywhere.
_ABSENT = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    # Its flags lie in memory, where no filter can look; every libc falls back to `clone`.
    "clone3": 435,
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
        },
        absent=_ABSENT,
        by_argument={"clone": 56, "unshare": 272, "ioctl": 16, "socket": 41},
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
        },
        absent=_ABSENT,
        by_argument={"clone": 220, "unshare": 97, "ioctl": 29, "socket": 198},
    ),
}

_SECCOMP_SET_MODE_FILTER = 1
# Without it, older kernels slow every thread of a filtered process down against a processor fault that
# matters to programs with their own sandbox inside one process.
_SECCOMP_FILTER_FLAG_SPEC_ALLOW = 4

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_IF_ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000
_X32_BIT = 0x40000000
_INSTRUCTION = struct.Struct("=HBBI")


#: Whether this process is filtered, and so all its forks.
_installed = False


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def filter_program(architecture: Architecture) -> bytes:
    """The filter in the kernel's classic BPF. Pure.

    Calls through another architecture's entry (32-bit programs, x32) do not exist: their numbers differ, so
    they would pass by the list.
    """
    not_here = _return(_FAIL_WITH | errno.ENOSYS)
    program = [
        _load(_ARCHITECTURE_OFFSET),
        _INSTRUCTION.pack(_JUMP_EQUAL, 1, 0, architecture.audit),
        not_here,
        _load(_NUMBER_OFFSET),
        _INSTRUCTION.pack(_JUMP_AT_LEAST, 0, 1, _X32_BIT),
        not_here,
    ]
    for calls, code in ((architecture.refused, errno.EPERM), (architecture.absent, errno.ENOSYS)):
        for number in calls.values():
            program += [_INSTRUCTION.pack(_JUMP_EQUAL, 0, 1, number), _return(_FAIL_WITH | code)]
    for name, number in architecture.by_argument.items():
        check = _check(BY_ARGUMENT[name])
        program += [_INSTRUCTION.pack(_JUMP_EQUAL, 0, len(check), number), *check]
    return b"".join([*program, _return(_ALLOW)])


def _check(rule: Rule) -> list[bytes]:
    """Instructions for one call, ending in a decision. Only the lower half of an argument is looked at: all
    that counts in these is there, and both machines store it first."""
    refuse, allow = _return(_FAIL_WITH | rule.code), _return(_ALLOW)
    program = [_load(_ARGUMENTS_OFFSET + 8 * rule.argument)]
    if rule.bits:
        program += [_INSTRUCTION.pack(_JUMP_IF_ANY, 0, 1, rule.bits), refuse]
    for value in rule.values:
        program += [_INSTRUCTION.pack(_JUMP_EQUAL, 0, 1, value), refuse]
    for value in rule.others:
        program += [_INSTRUCTION.pack(_JUMP_EQUAL, 0, 1, value), allow]
    return [*program, refuse if rule.others else allow]


@functools.cache
def own_program() -> bytes | None:
    """The filter for this machine; None where its architecture is not listed. A template calls it once, for
    all its forks."""
    architecture = ARCHITECTURES.get(os.uname().machine)
    return None if architecture is None else filter_program(architecture)


def install_filter() -> None:
    """Filter this process and all that it starts, for good, unless it was forked from one that did. Needs
    no-new-privileges to be set.

    On other architectures than those listed nothing is filtered; the namespaces hold there as well.

    Raises:
        OSError: the kernel refused.
    """
    global _installed
    architecture = ARCHITECTURES.get(os.uname().machine)
    code = own_program()
    if architecture is None or code is None or _installed:
        return
    instructions = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // _INSTRUCTION.size, ctypes.addressof(instructions))
    syscall(
        architecture.seccomp,
        _SECCOMP_SET_MODE_FILTER,
        _SECCOMP_FILTER_FLAG_SPEC_ALLOW,
        ctypes.addressof(program),
    )
    _installed = True


def _load(offset: int) -> bytes:
    return _INSTRUCTION.pack(_LOAD, 0, 0, offset)


def _return(value: int) -> bytes:
    return _INSTRUCTION.pack(_RETURN, 0, 0, value)
