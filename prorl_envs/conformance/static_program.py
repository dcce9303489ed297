"""Statically linked ELF program that can be the only file of an image, for x86_64 and aarch64.

It writes `ready` and a line break, reads its standard input until the end of file, and exits with status 0.
The layout is from elf(5), the numbers of the system calls are from the kernel's tables.
"""

import struct

_ADDRESS = 0x400000
_FILE, _SEGMENT = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQQQ")
_START = _FILE.size + _SEGMENT.size
_TEXT = b"ready\n"

_X86 = bytes.fromhex(
    "b801000000 bf01000000 488d3522000000 ba06000000 0f05"  # write(1, text, 6)
    "31c0 31ff 4889e6 ba01000000 0f05"  # again: read(0, stack, 1)
    "85c0 7fee"  # if > 0: goto again
    "b8e7000000 31ff 0f05"  # exit_group(0)
)
_ARM = struct.pack(
    "<15I",
    *(0xD2800020, 0x100001C1, 0xD28000C2, 0xD2800808, 0xD4000001),  # write(1, text, 6)
    *(0xD2800000, 0x910003E1, 0xD2800022, 0xD28007E8, 0xD4000001),  # again: read(0, stack, 1)
    *(0xF100001F, 0x54FFFF4C),  # if > 0: goto again
    *(0xD2800000, 0xD2800BC8, 0xD4000001),  # exit_group(0)
)
#: Number of the machine in ELF, and the instructions.
_MACHINES = {"x86_64": (62, _X86), "aarch64": (183, _ARM)}


def static_program(machine: str) -> bytes:
    """Return the content of the program's file.

    Args:
        machine: as in `os.uname().machine`.

    Raises:
        KeyError: there is no program for this machine.
    """
    number, instructions = _MACHINES[machine]
    content = instructions + _TEXT
    size = _START + len(content)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")  # 64 bits, little-endian
    header = _FILE.pack(
        ident, 2, number, 1, _ADDRESS + _START, _FILE.size, 0, 0, _FILE.size, _SEGMENT.size, 1, 0, 0, 0
    )
    segment = _SEGMENT.pack(1, 5, 0, _ADDRESS, _ADDRESS, size, size, 0x1000)  # loaded, read and executed
    return header + segment + content
