"""A program that waits: what a sandbox's first process becomes.

It reads its standard input to the end and exits, without a library and almost without memory: some 150 bytes
that all sandboxes share, where a shell takes a millisecond of the processor and 100 KB, and a copy of this
interpreter a megabyte. Numbers of calls are from the kernel's tables, the file's layout from elf(5).
"""

import functools
import os
import struct

#: Where the file lies in memory.
_ADDRESS = 0x400000
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT_HEADER = struct.Struct("<IIQQQQQQ")
_MFD_CLOEXEC, _MFD_EXEC = 1, 0x10

#: By machine: ELF's number of it, and the instructions.
_PROGRAMS = {
    "x86_64": (
        62,
        bytes.fromhex(
            "31ff"  # again: edi = 0, standard input
            "4889e6"  # rsi = the stack
            "ba01000000"  # edx = 1 byte
            "31c0"  # eax = read
            "0f05"  # call the kernel
            "85c0"  # something was read:
            "7fee"  #   again
            "31ff"  # edi = 0
            "b8e7000000"  # eax = exit_group
            "0f05"  # call the kernel
        ),
    ),
    "aarch64": (
        183,
        struct.pack(
            "<10I",
            0xD2800000,  # again: x0 = 0, standard input
            0x910003E1,  # x1 = the stack
            0xD2800022,  # x2 = 1 byte
            0xD28007E8,  # x8 = read
            0xD4000001,  # call the kernel
            0xF100001F,  # something was read:
            0x54FFFF4C,  #   again
            0xD2800000,  # x0 = 0
            0xD2800BC8,  # x8 = exit_group
            0xD4000001,  # call the kernel
        ),
    ),
}


def program(machine: str) -> bytes:
    """The file of the program for a machine, as `uname -m` names it. Pure.

    Raises:
        KeyError: there is none for this one.
    """
    number, code = _PROGRAMS[machine]
    start = _ELF_HEADER.size + _SEGMENT_HEADER.size
    size = start + len(code)
    identity = b"\x7fELF" + bytes((2, 1, 1))  # 64 bits, little-endian, version 1
    executable, loaded, readable_executable = 2, 1, 5
    sizes = (_ELF_HEADER.size, _SEGMENT_HEADER.size, 1, 0, 0, 0)
    header = (identity, executable, number, 1, _ADDRESS + start, _ELF_HEADER.size, 0, 0, *sizes)
    segment = (loaded, readable_executable, 0, _ADDRESS, _ADDRESS, size, size, 0x1000)
    return _ELF_HEADER.pack(*header) + _SEGMENT_HEADER.pack(*segment) + code


@functools.cache
def waiter() -> int | None:
    """A descriptor of the program, to be executed by `os.execve`; None where this machine has none, or
    forbids programs in memory."""
    try:
        content = program(os.uname().machine)
        try:
            fd = os.memfd_create("sandbox", _MFD_CLOEXEC | _MFD_EXEC)
        except OSError:  # before Linux 6.3 there is no such flag, and no need of it
            fd = os.memfd_create("sandbox", _MFD_CLOEXEC)
    except (KeyError, OSError):
        return None
    os.write(fd, content)
    # Executed through a descriptor that nobody can write by: a program that is open for writing is busy.
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    finally:
        os.close(fd)
