"""A program that waits: what a sandbox's first process becomes.

It reads its standard input to the end and exits, without a library and almost without memory: some 180 bytes
that all sandboxes share, where a shell takes a millisecond of the processor and 100 KB, and a copy of this
interpreter a megabyte. Numbers of calls are from the kernel's tables, the file's layout from elf(5).
"""

import fcntl
import functools
import os
import struct

#: Where the file lies in memory.
_ADDRESS = 0x400000
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT_HEADER = struct.Struct("<IIQQQQQQ")
#: Where its instructions do.
_START = _ADDRESS + _ELF_HEADER.size + _SEGMENT_HEADER.size
_MFD_EXEC = 0x10  # not in `os`
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL

#: By which it is known inside, other than as what the descriptor is called that it is executed by.
_NAME = b"sandbox\0"


def _x86_64() -> bytes:
    code = bytes.fromhex(
        "b89d000000"  # eax = prctl
        "bf0f000000"  # edi = PR_SET_NAME
        "be00000000"  # esi = the name, filled in below
        "0f05"  # call the kernel
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
    )
    name = struct.pack("<I", _START + len(code))
    return code[:11] + name + code[15:] + _NAME


def _aarch64() -> bytes:
    code = [
        0xD28001E0,  # x0 = PR_SET_NAME
        0x10000001,  # x1 = the name, so many instructions from here
        0xD28014E8,  # x8 = prctl
        0xD4000001,  # call the kernel
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
    ]
    code[1] |= (len(code) - 1) << 5
    return struct.pack(f"<{len(code)}I", *code) + _NAME


#: By machine: ELF's number of it, and the instructions.
_PROGRAMS = {"x86_64": (62, _x86_64()), "aarch64": (183, _aarch64())}


def program(machine: str) -> bytes:
    """The file of the program for a machine, as `uname -m` names it. Pure.

    Raises:
        KeyError: there is none for this one.
    """
    number, code = _PROGRAMS[machine]
    size = _START - _ADDRESS + len(code)
    identity = b"\x7fELF" + bytes((2, 1, 1))  # 64 bits, little-endian, version 1
    executable, loaded, readable_executable = 2, 1, 5
    sizes = (_ELF_HEADER.size, _SEGMENT_HEADER.size, 1, 0, 0, 0)
    header = (identity, executable, number, 1, _START, _ELF_HEADER.size, 0, 0, *sizes)
    segment = (loaded, readable_executable, 0, _ADDRESS, _ADDRESS, size, size, 0x1000)
    return _ELF_HEADER.pack(*header) + _SEGMENT_HEADER.pack(*segment) + code


@functools.cache
def waiter() -> int | None:
    """A descriptor of the program, to be executed by `os.execve`; None where this machine has none, or
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
