"""seccomp filter for every process in a sandbox, as classic BPF.

`syscall_rules.py` lists the refused calls and the reasons.
"""

import ctypes
import errno
import functools
import os
import stat
import struct

from prorl_envs.sandbox.linux.syscall_rules import ARCHITECTURES, BY_ARGUMENT, Architecture, Condition, Rule
from prorl_envs.sandbox.linux.syscall_wrappers import syscall

_SECCOMP_SET_MODE_FILTER = 1
# Without this flag, older kernels slow down every thread of a filtered process to mitigate a processor fault,
# which matters only to programs with their own sandbox inside one process.
_SECCOMP_FILTER_FLAG_SPEC_ALLOW = 4

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_IF_ANY, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_JUMP_ALWAYS, _ALL_BITS = 0x05, 0xFFFFFFFF
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000
_X32_BIT = 0x40000000
_FILE_TYPE = 0o170000
_INSTRUCTION = struct.Struct("=HBBI")


#: Whether this process is filtered, and therefore all its forks.
_installed = False


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def filter_program(architecture: Architecture) -> bytes:
    """Return the filter as classic BPF. Pure.

    Calls through another architecture's entry (32-bit programs, x32) fail with ENOSYS: their numbers differ,
    so they would bypass the list.
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
        check = [part for rule in BY_ARGUMENT[name] for part in _check(rule)]
        check.append(_return(_ALLOW))
        program += [_INSTRUCTION.pack(_JUMP_EQUAL, 0, len(check), number), *check]
    return b"".join([*program, _return(_ALLOW)])


def _check(rule: Rule) -> list[bytes]:
    """Return instructions that refuse a call by one rule, or fall through.

    Only the lower half of an argument is compared: the kernel uses no more of these arguments, and both
    architectures store that half first.
    """
    refuse = _return(_FAIL_WITH | rule.code)
    program = [_load_argument(rule.argument)]
    if rule.mask != _ALL_BITS:
        program.append(_INSTRUCTION.pack(_AND, 0, 0, rule.mask))
    if rule.any_bit:
        program += [_INSTRUCTION.pack(_JUMP_IF_ANY, 0, 1, rule.any_bit), refuse]
    for value in rule.values:
        program += [_INSTRUCTION.pack(_JUMP_EQUAL, 0, 1, value), refuse]
    if rule.allowed:
        program += [*_skip_if_equal(rule.allowed, 1), refuse]
    return [*_skip_unless(rule.only_if, len(program)), *program]


def _skip_if_equal(values: tuple[int, ...], count: int) -> list[bytes]:
    """Return instructions that skip the next `count` instructions if the loaded value is one of these."""
    last = count + len(values) - 1
    return [_INSTRUCTION.pack(_JUMP_EQUAL, last - index, 0, value) for index, value in enumerate(values)]


def _skip_unless(condition: Condition | None, count: int) -> list[bytes]:
    """Return instructions that skip the next `count` instructions unless `condition` holds."""
    if condition is None:
        return []
    skip = _INSTRUCTION.pack(_JUMP_ALWAYS, 0, 0, count)
    return [_load_argument(condition.argument), *_skip_if_equal(condition.values, 1), skip]


def root_emulation_program(architecture: Architecture) -> bytes:
    """Return the filter in which the calls of `Architecture.emulated` report success and do nothing. Pure.

    Installed beside the filter of `filter_program`, whose permissions it overrides (seccomp(2)).
    """
    done = _return(_FAIL_WITH)
    program = [
        _load(_ARCHITECTURE_OFFSET),
        _INSTRUCTION.pack(_JUMP_EQUAL, 1, 0, architecture.audit),
        _return(_ALLOW),
        _load(_NUMBER_OFFSET),
    ]
    for number in architecture.emulated.values():
        program += [_INSTRUCTION.pack(_JUMP_EQUAL, 0, 1, number), done]
    for number, argument in architecture.emulated_devices.values():
        devices = Rule(argument=argument, code=0, mask=_FILE_TYPE, values=(stat.S_IFCHR, stat.S_IFBLK))
        check = [*_check(devices), _return(_ALLOW)]
        program += [_INSTRUCTION.pack(_JUMP_EQUAL, 0, len(check), number), *check]
    return b"".join([*program, _return(_ALLOW)])


@functools.cache
def own_program() -> bytes | None:
    """Return the filter for this machine; None if its architecture is not listed. Cached: a template calls it
    once, for all its forks."""
    architecture = ARCHITECTURES.get(os.uname().machine)
    return None if architecture is None else filter_program(architecture)


@functools.cache
def root_emulation() -> bytes | None:
    """Return the filter of an emulated root for this machine; None if its architecture is not listed."""
    architecture = ARCHITECTURES.get(os.uname().machine)
    return None if architecture is None else root_emulation_program(architecture)


def install_filter() -> None:
    """Filter this process and all that it starts, permanently, unless it was forked from a filtered one.

    Needs no-new-privileges to be set. Architectures that are not listed get no filter.

    Raises:
        OSError: the kernel refused.
    """
    global _installed
    if not _installed:
        _install(own_program())
        _installed = True


def install_root_emulation() -> None:
    """Make this process and all that it starts believe that they have root's privileges: see `SandboxSpec`.

    Raises:
        OSError: the kernel refused.
    """
    _install(root_emulation())


def _install(code: bytes | None) -> None:
    architecture = ARCHITECTURES.get(os.uname().machine)
    if architecture is None or code is None:
        return
    instructions = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // _INSTRUCTION.size, ctypes.addressof(instructions))
    syscall(
        architecture.seccomp,
        _SECCOMP_SET_MODE_FILTER,
        _SECCOMP_FILTER_FLAG_SPEC_ALLOW,
        ctypes.addressof(program),
    )


def _load(offset: int) -> bytes:
    return _INSTRUCTION.pack(_LOAD, 0, 0, offset)


def _load_argument(index: int) -> bytes:
    return _load(_ARGUMENTS_OFFSET + 8 * index)


def _return(value: int) -> bytes:
    return _INSTRUCTION.pack(_RETURN, 0, 0, value)
