"""The program that a sandbox's first process is: it mounts the sandbox's view of processes, gives up every
privilege, and waits for the end of its standard input.

A hundred instructions without a library and almost without memory, which all sandboxes share: a shell takes a
millisecond of the processor and 100 KB, a copy of this interpreter a megabyte. It is a list of system calls,
and exits with the error of the first that fails. Numbers of calls are from the kernel's tables, the file's
layout from elf(5), instructions from the manuals of the two machines.
"""

import fcntl
import functools
import os
import signal
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from prorl_envs.sandbox.syscalls import PR_SET_DUMPABLE, capability_sets

#: Its descriptors: what ends it, the way to who makes the sandbox, that one's folder in the host's /proc; and
#: the number that its next one gets.
LIFETIME, MAKER, FOLDER, _NEXT = 0, 3, 4, 5
#: What it tells the maker, in turn.
PROCESSES, READY = b"p", b"r"
#: Where the sandbox's root is while it is made.
ROOT = "/root"

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_PR_SET_NAME = 15
#: The kernel's `struct sigaction`, and the size of its set of signals.
_IGNORE, _SIGNALS_SIZE = struct.pack("<4Q", signal.SIG_IGN, 0, 0, 0), 8
#: The capability that it keeps. It is without power in a user namespace, and makes the process more
#: privileged than all others inside, so that none can trace it and take its lifetime socket.
_CAP_SYS_PACCT = 20
#: By which it is known inside, other than as what the descriptor is called that it is executed by.
_NAME = b"sandbox\0"

#: Where the file lies in memory.
_ADDRESS = 0x400000
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT_HEADER = struct.Struct("<IIQQQQQQ")
#: Where its instructions do.
_START = _ADDRESS + _ELF_HEADER.size + _SEGMENT_HEADER.size
_MFD_EXEC = 0x10  # not in `os`
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class Call:
    """A system call.

    Args:
        name: as in a machine's `numbers`.
        arguments: numbers, data to point to, or None for the address of the stack.
        least: a result below it ends the program.
    """

    name: str
    arguments: tuple[int | bytes | None, ...]
    least: int = 0


#: What comes before it waits. Its namespace of users is that of who makes the sandbox, once there is one.
CALLS = (
    Call("prctl", (_PR_SET_NAME, _NAME)),
    Call("mount", (b"proc\0", f"{ROOT}/proc\0".encode(), b"proc\0", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, 0)),
    Call("write", (MAKER, PROCESSES, 1), 1),
    Call("read", (MAKER, None, 1), 1),
    Call("openat", (FOLDER, b"ns/user\0", os.O_RDONLY)),
    Call("setns", (_NEXT, os.CLONE_NEWUSER)),
    Call("capset", capability_sets(1 << _CAP_SYS_PACCT)),
    # Orphans are reaped by the kernel.
    Call("rt_sigaction", (signal.SIGCHLD, _IGNORE, 0, _SIGNALS_SIZE)),
    # Or the host's ordinary user could not reach it by its files in /proc.
    Call("prctl", (PR_SET_DUMPABLE, 1)),
    *(Call("close", (fd,)) for fd in (FOLDER, _NEXT)),
    Call("write", (MAKER, READY, 1), 1),
    Call("close", (MAKER,)),
)
_WAIT = Call("read", (LIFETIME, None, 1), 1)


class _Machine(ABC):
    """Writes instructions.

    Args:
        elf: ELF's number of the machine.
        numbers: its kernel's of the calls.
    """

    elf: ClassVar[int]
    numbers: ClassVar[Mapping[str, int]]

    @abstractmethod
    def move(self, index: int, value: int) -> bytes:
        """Make a number the argument of a call."""

    @abstractmethod
    def move_stack(self, index: int) -> bytes:
        """Make the address of the stack the argument of a call."""

    @abstractmethod
    def call(self, name: str) -> bytes: ...

    @abstractmethod
    def leave_if_less(self, least: int, distance: int) -> bytes:
        """Go on at a distance from here where the result of a call is less."""

    @abstractmethod
    def jump(self, distance: int) -> bytes: ...

    @abstractmethod
    def move_error(self) -> bytes:
        """Make the error number of a call, or 0, the first argument of the next."""


class _X86(_Machine):
    elf = 62
    numbers: ClassVar = {
        "prctl": 157, "mount": 165, "write": 1, "read": 0, "openat": 257, "setns": 308, "capset": 126,
        "rt_sigaction": 13, "close": 3, "exit_group": 231,
    }  # fmt: skip

    def move(self, index: int, value: int) -> bytes:
        moves = b"\xbf", b"\xbe", b"\xba", b"\x41\xba", b"\x41\xb8"  # to edi, esi, edx, r10d, r8d
        return moves[index] + struct.pack("<I", value)

    def move_stack(self, index: int) -> bytes:
        return b"\x48\x89" + bytes([0xE0 | (7, 6, 2)[index]])

    def call(self, name: str) -> bytes:
        return b"\xb8" + struct.pack("<I", self.numbers[name]) + b"\x0f\x05"

    def leave_if_less(self, least: int, distance: int) -> bytes:
        return struct.pack("<3sB2si", b"\x48\x83\xf8", least, b"\x0f\x8c", distance - 10)

    def jump(self, distance: int) -> bytes:
        return struct.pack("<Bi", 0xE9, distance - 5)

    def move_error(self) -> bytes:
        return b"\x89\xc7\xf7\xdf"


class _Arm(_Machine):
    elf = 183
    numbers: ClassVar = {
        "prctl": 167, "mount": 40, "write": 64, "read": 63, "openat": 56, "setns": 268, "capset": 91,
        "rt_sigaction": 134, "close": 57, "exit_group": 94,
    }  # fmt: skip

    def move(self, index: int, value: int) -> bytes:
        low, high = value & 0xFFFF, value >> 16
        return struct.pack("<2I", 0x52800000 | low << 5 | index, 0x72A00000 | high << 5 | index)

    def move_stack(self, index: int) -> bytes:
        return struct.pack("<I", 0x910003E0 | index)

    def call(self, name: str) -> bytes:
        return self.move(8, self.numbers[name]) + struct.pack("<I", 0xD4000001)

    def leave_if_less(self, least: int, distance: int) -> bytes:
        steps = (distance - 4) // 4 & 0x7FFFF
        return struct.pack("<2I", 0xF100001F | least << 10, 0x5400000B | steps << 5)

    def jump(self, distance: int) -> bytes:
        return struct.pack("<I", 0x14000000 | distance // 4 & 0x3FFFFFF)

    def move_error(self) -> bytes:
        return struct.pack("<I", 0x4B0003E0)


_MACHINES: Mapping[str, _Machine] = {"x86_64": _X86(), "aarch64": _Arm()}


def program(name: str, calls: Sequence[Call] = CALLS) -> bytes:
    """The file of a program that makes these calls, then waits, for a machine as `uname -m` names it. Pure.

    Raises:
        KeyError: there is none for this one.
    """
    machine = _MACHINES[name]
    code, end, _ = _instructions(machine, calls, 0, 0)
    code, _, data = _instructions(machine, calls, end, _START + len(code))
    identity = b"\x7fELF" + bytes((2, 1, 1))  # 64 bits, little-endian, version 1
    executable, loaded, readable_executable = 2, 1, 5
    sizes = (_ELF_HEADER.size, _SEGMENT_HEADER.size, 1, 0, 0, 0)
    header = (identity, executable, machine.elf, 1, _START, _ELF_HEADER.size, 0, 0, *sizes)
    size = _START - _ADDRESS + len(code) + len(data)
    segment = (loaded, readable_executable, 0, _ADDRESS, _ADDRESS, size, size, 0x1000)
    return _ELF_HEADER.pack(*header) + _SEGMENT_HEADER.pack(*segment) + code + data


def _instructions(
    machine: _Machine, calls: Sequence[Call], end: int, data_at: int
) -> tuple[bytes, int, bytes]:
    """The instructions, where among them the end is, and the data behind them; given those two's places."""
    code, data = b"", b""
    for call in (*calls, _WAIT):
        begin = len(code)
        for index, argument in enumerate(call.arguments):
            if argument is None:
                code += machine.move_stack(index)
            elif isinstance(argument, int):
                code += machine.move(index, argument)
            else:
                code += machine.move(index, data_at + len(data))
                data += argument + bytes(-len(argument) % 4)
        code += machine.call(call.name)
        code += machine.leave_if_less(call.least, end - len(code))
    code += machine.jump(begin - len(code))
    end = len(code)
    code += machine.move_error() + machine.call("exit_group")
    return code, end, data


@functools.cache
def waiter() -> int | None:
    """A descriptor of the program, to be executed by `os.posix_spawn`; None where this machine has none, or
    forbids programs in memory."""
    try:
        content = program(os.uname().machine)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            fd = os.memfd_create("sandbox", flags | _MFD_EXEC)
        except OSError:  # before Linux 6.3 there is no such flag, and no need of it
            fd = os.memfd_create("sandbox", flags)
    except (KeyError, OSError):
        return None
    os.write(fd, content)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # all sandboxes share it
    # Executed through a descriptor that was opened to read: a program that is open for writing is busy.
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    finally:
        os.close(fd)
