"""ELF programs that are lists of system calls, without a library and almost without memory.

The launcher of a sandbox (`launcher.py`) is one: it starts in the time of some page faults, while a shell
takes a millisecond of CPU time and a fork of this interpreter two. Call numbers are from the kernel's tables,
the file layout is from elf(5), instructions are from the manuals of the two architectures.
"""

import fcntl
import os
import signal
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

#: Label for failed calls: the program writes the error and the call's index in the program, as two numbers,
#: to the socket `WAY`, and exits.
FAIL = "fail"
#: Label for the normal exit of a program.
END = "end"
#: Descriptor of the socket to the host.
WAY = 3
FAILURE = struct.Struct("=iI")
#: Name of a program in memory.
NAME = "sandbox"
#: Value of `Call.least`: continue with any result.
ANY = None

#: Address of the file in memory.
_ADDRESS = 0x400000
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT_HEADER = struct.Struct("<IIQQQQQQ")
#: Address of its instructions.
_START = _ADDRESS + _ELF_HEADER.size + _SEGMENT_HEADER.size
_MFD_EXEC = 0x10  # not in `os`
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_WORD = 8


@dataclass(frozen=True, slots=True)
class Stack:
    """Address of the stack, which receives the output of a call."""


@dataclass(frozen=True, slots=True)
class Table:
    """Data made of words: numbers, and addresses of other data."""

    words: "tuple[int | bytes | Table, ...]"


type Argument = int | bytes | Table | Stack


@dataclass(frozen=True, slots=True)
class Call:
    """System call.

    Args:
        name: key in a machine's `numbers`.
        arguments: numbers; data to point to.
        what: its purpose, for error messages.
        least: a result below it is a failure.
        but: an error number that is not a failure.
        otherwise: the label to jump to on failure.
    """

    name: str
    arguments: tuple[Argument, ...]
    what: str = ""
    least: int | None = 0
    but: int = 0
    otherwise: str = FAIL


@dataclass(frozen=True, slots=True)
class Label:
    """Jump target in a program."""

    name: str


@dataclass(frozen=True, slots=True)
class Jump:
    """Jump to a label; with `if_none`, only if the last call returned 0, as in a child that it created."""

    to: str
    if_none: bool = False


type Step = Call | Label | Jump


class _Machine(ABC):
    """Encoder of instructions.

    Args:
        elf: ELF's number of the machine.
        numbers: the kernel's call numbers.
    """

    elf: ClassVar[int]
    numbers: ClassVar[Mapping[str, int]]

    @abstractmethod
    def move(self, index: int, value: int) -> bytes:
        """Set an argument of a call to a number."""

    @abstractmethod
    def move_stack(self, index: int) -> bytes:
        """Set an argument of a call to the address of the stack."""

    @abstractmethod
    def note(self, value: int) -> bytes:
        """Keep a number in a register that calls preserve."""

    @abstractmethod
    def call(self, name: str) -> bytes: ...

    @abstractmethod
    def leave_if_less(self, least: int, distance: int) -> bytes:
        """Jump by `distance` if the result of a call is less than `least`."""

    @abstractmethod
    def leave_if_error(self, error: int, distance: int) -> bytes:
        """Jump by `distance` if the result of a call is this error."""

    @abstractmethod
    def leave_if_none(self, distance: int) -> bytes:
        """Jump by `distance` if the result of a call is 0."""

    @abstractmethod
    def jump(self, distance: int) -> bytes: ...

    @abstractmethod
    def store_failure(self) -> bytes:
        """Store the error number of a call, and the number kept by `note`, on the stack."""


class _X86(_Machine):
    elf = 62
    numbers: ClassVar = {
        "read": 0, "write": 1, "close": 3, "rt_sigaction": 13, "ioctl": 16, "socket": 41, "sendmsg": 46,
        "socketpair": 53, "clone": 56, "execve": 59, "wait4": 61, "chdir": 80, "fchdir": 81, "umask": 95,
        "setsid": 112, "capset": 126, "pivot_root": 155, "prctl": 157, "mount": 165, "umount2": 166,
        "sethostname": 170,
        "exit_group": 231, "waitid": 247, "openat": 257, "mkdirat": 258, "mknodat": 259, "symlinkat": 266,
        "unshare": 272, "dup3": 292, "pipe2": 293, "prlimit64": 302, "setns": 308, "seccomp": 317,
        "memfd_create": 319, "close_range": 436, "openat2": 437, "mount_setattr": 442,
    }  # fmt: skip

    def move(self, index: int, value: int) -> bytes:
        moves = b"\xbf", b"\xbe", b"\xba", b"\x41\xba", b"\x41\xb8"  # to edi, esi, edx, r10d, r8d
        return moves[index] + struct.pack("<I", value & 0xFFFFFFFF)

    def move_stack(self, index: int) -> bytes:
        return (b"\x48\x89\xe7", b"\x48\x89\xe6", b"\x48\x89\xe2", b"\x49\x89\xe2")[index]

    def note(self, value: int) -> bytes:
        return b"\x41\xbc" + struct.pack("<I", value)  # to r12d

    def call(self, name: str) -> bytes:
        return b"\xb8" + struct.pack("<I", self.numbers[name]) + b"\x0f\x05"

    def leave_if_less(self, least: int, distance: int) -> bytes:
        return struct.pack("<3sb2si", b"\x48\x83\xf8", least, b"\x0f\x8c", distance - 10)

    def leave_if_error(self, error: int, distance: int) -> bytes:
        return struct.pack("<3sb2si", b"\x48\x83\xf8", -error, b"\x0f\x84", distance - 10)

    def leave_if_none(self, distance: int) -> bytes:
        return self.leave_if_error(0, distance)

    def jump(self, distance: int) -> bytes:
        return struct.pack("<Bi", 0xE9, distance - 5)

    def store_failure(self) -> bytes:
        return b"\xf7\xd8" + b"\x89\x04\x24" + b"\x44\x89\x64\x24\x04"


class _Arm(_Machine):
    elf = 183
    numbers: ClassVar = {
        "read": 63, "write": 64, "close": 57, "rt_sigaction": 134, "ioctl": 29, "socket": 198, "sendmsg": 211,
        "socketpair": 199, "clone": 220, "execve": 221, "wait4": 260, "chdir": 49, "fchdir": 50, "umask": 166,
        "setsid": 157, "capset": 91, "pivot_root": 41, "prctl": 167, "mount": 40, "umount2": 39,
        "sethostname": 161,
        "exit_group": 94, "waitid": 95, "openat": 56, "mkdirat": 34, "mknodat": 33, "symlinkat": 36,
        "unshare": 97, "dup3": 24, "pipe2": 59, "prlimit64": 261, "setns": 268, "seccomp": 277,
        "memfd_create": 279, "close_range": 436, "openat2": 437, "mount_setattr": 442,
    }  # fmt: skip

    def move(self, index: int, value: int) -> bytes:
        low, high = value & 0xFFFF, value >> 16 & 0xFFFF
        return struct.pack("<2I", 0x52800000 | low << 5 | index, 0x72A00000 | high << 5 | index)

    def move_stack(self, index: int) -> bytes:
        return struct.pack("<I", 0x910003E0 | index)

    def note(self, value: int) -> bytes:
        return struct.pack("<I", 0x52800000 | value << 5 | 19)

    def call(self, name: str) -> bytes:
        return self.move(8, self.numbers[name]) + struct.pack("<I", 0xD4000001)

    def leave_if_less(self, least: int, distance: int) -> bytes:
        return struct.pack("<I", 0xF100001F | least << 10) + self._leave(0xB, distance - 4)

    def leave_if_error(self, error: int, distance: int) -> bytes:
        return struct.pack("<I", 0xB100001F | error << 10) + self._leave(0, distance - 4)

    def leave_if_none(self, distance: int) -> bytes:
        return struct.pack("<I", 0xB4000000 | (distance // 4 & 0x7FFFF) << 5)

    def _leave(self, condition: int, distance: int) -> bytes:
        return struct.pack("<I", 0x54000000 | (distance // 4 & 0x7FFFF) << 5 | condition)

    def jump(self, distance: int) -> bytes:
        return struct.pack("<I", 0x14000000 | distance // 4 & 0x3FFFFFF)

    def store_failure(self) -> bytes:
        return struct.pack("<3I", 0x4B0003E0, 0xB90003E0, 0xB90007F3)


#: Encoders by the names of `uname -m`.
MACHINES: Mapping[str, _Machine] = {"x86_64": _X86(), "aarch64": _Arm()}


class _Assembler:
    """Writer of a program, given the positions of its labels and data; a first run finds these positions.

    Args:
        labels: positions in the instructions.
        data_at: the address of the data.
    """

    def __init__(self, machine: _Machine, labels: Mapping[str, int], data_at: int) -> None:
        self._machine, self._given, self._data_at = machine, labels, data_at
        self.code, self.data = bytearray(), bytearray()
        self.labels: dict[str, int] = {}
        self._known: dict[bytes | Table, int] = {}

    def write(self, steps: Sequence[Step]) -> None:
        for index, step in enumerate(steps):
            match step:
                case Label():
                    self.labels[step.name] = len(self.code)
                case Jump(if_none=True):
                    self.code += self._machine.leave_if_none(self._distance(step.to))
                case Jump():
                    self.code += self._machine.jump(self._distance(step.to))
                case Call():
                    self._call(index, step)

    def write_ends(self) -> None:
        """Write the normal exit, which follows the last step, and the exit after a failure."""
        self.labels[END] = len(self.code)
        self._call(0, Call("exit_group", (0,), least=ANY))
        self.labels[FAIL] = len(self.code)
        self.code += self._machine.store_failure()
        for step in (
            Call("write", (WAY, Stack(), FAILURE.size), least=ANY),
            Call("exit_group", (1,), least=ANY),
        ):
            self._call(0, step)

    def _call(self, index: int, call: Call) -> None:
        machine = self._machine
        if call.least is not ANY:
            self.code += machine.note(index)
        for number, argument in enumerate(call.arguments):
            if isinstance(argument, Stack):
                self.code += machine.move_stack(number)
            else:
                self.code += machine.move(number, self._value(argument))
        self.code += machine.call(call.name)
        if call.least is ANY:
            return
        leave = machine.leave_if_less(call.least, self._distance(call.otherwise) if not call.but else 0)
        if call.but:
            skip = machine.leave_if_error(call.but, 0)
            self.code += machine.leave_if_error(call.but, len(skip) + len(leave))
            leave = machine.leave_if_less(call.least, self._distance(call.otherwise))
        self.code += leave

    def _distance(self, label: str) -> int:
        at = self._given[label] if self._given else 0
        return at - len(self.code)

    def _value(self, argument: int | bytes | Table) -> int:
        if isinstance(argument, int):
            return argument
        if argument not in self._known:
            content = (
                b"".join(struct.pack("<Q", self._value(word)) for word in argument.words)
                if isinstance(argument, Table)
                else argument
            )
            self._known[argument] = len(self.data)
            self.data += content + bytes(-len(content) % _WORD)
        return self._data_at + self._known[argument]


def program(name: str, steps: Sequence[Step]) -> bytes:
    """Return the ELF file of a program that runs these steps, for a machine as `uname -m` names it. Pure.

    Raises:
        KeyError: the machine is not supported.
    """
    machine = MACHINES[name]
    labels: Mapping[str, int] = {}
    data_at = 0
    for _ in range(2):
        assembler = _Assembler(machine, labels, data_at)
        assembler.write(steps)
        assembler.write_ends()
        assembler.code += bytes(-len(assembler.code) % _WORD)
        labels, data_at = assembler.labels, _START + len(assembler.code)
    identity = b"\x7fELF" + bytes((2, 1, 1))  # 64 bits, little-endian, version 1
    executable, loaded, readable_executable = 2, 1, 5
    sizes = (_ELF_HEADER.size, _SEGMENT_HEADER.size, 1, 0, 0, 0)
    header = (identity, executable, machine.elf, 1, _START, _ELF_HEADER.size, 0, 0, *sizes)
    size = _START - _ADDRESS + len(assembler.code) + len(assembler.data)
    segment = (loaded, readable_executable, 0, _ADDRESS, _ADDRESS, size, size, 0x1000)
    return _ELF_HEADER.pack(*header) + _SEGMENT_HEADER.pack(*segment) + assembler.code + assembler.data


def in_memory(content: bytes) -> int:
    """Return a descriptor of a program in memory, through which the program is executed.

    Raises:
        OSError: this machine forbids programs in memory.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(NAME, flags | _MFD_EXEC)
    except OSError:  # Linux before 6.3 neither has nor needs the flag
        fd = os.memfd_create(NAME, flags)
    # Executed through a descriptor opened for reading: a program that is open for writing is busy.
    try:
        os.write(fd, content)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # many sandboxes share it
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def spawn(command: Sequence[str], fds: Sequence[int]) -> int:
    """Start a program without a copy of this process: creating and destroying a copy would take longer than
    the program's start. The program leads its own session and has no environment.

    Args:
        command: the program's path and arguments, its name first. An empty path means one in memory.
        fds: the descriptor for its standard streams, the descriptors for its next numbers, and that of a
            program in memory, which the program also has open at another number.

    Returns:
        its pid, a child of this process.

    Raises:
        OSError: it cannot be run.
    """
    path, *arguments = command
    streams, *others = fds
    # Through high numbers, so that no target overwrites a source.
    high = max(fds) + 1
    sources = [streams] * 3 + others
    ways = [(os.POSIX_SPAWN_DUP2, fd, high + place) for place, fd in enumerate(sources)]
    places = list(range(len(sources)))
    if not path:
        program_at = places.pop()
        path = f"/proc/self/fd/{high + program_at}"
    arrivals = [(os.POSIX_SPAWN_DUP2, high + place, place) for place in places]
    departures = [(os.POSIX_SPAWN_CLOSE, high + place) for place in places]
    return os.posix_spawn(
        path,
        arguments,
        {},
        file_actions=[*ways, *arrivals, *departures],
        setsid=True,
        # Programs inherit ignored and blocked signals, whether from Python or from this process's parent.
        setsigdef=signal.valid_signals(),
        setsigmask=(),
    )
