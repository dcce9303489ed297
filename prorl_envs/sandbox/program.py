"""Programs that are lists of system calls, without a library and almost without memory.

What makes a sandbox is one of them (`making.py`): it starts in the time of some page faults, where a shell
takes a millisecond of the processor and a copy of this interpreter two. Numbers of calls are from the
kernel's tables, the file's layout from elf(5), instructions from the manuals of the two machines.
"""

import fcntl
import os
import signal
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

#: Where a call goes on that fails: what it was meant for, its index in the program, goes with its error into
#: the socket `WAY`, as two numbers, and the program ends.
FAIL = "fail"
#: Where a program ends as it should.
END = "end"
#: The descriptor of that socket.
WAY = 3
FAILURE = struct.Struct("=iI")
#: What a program in memory is called.
NAME = "sandbox"
#: Of `Call.least`: whatever it returns, go on.
ANY = None

#: Where the file lies in memory.
_ADDRESS = 0x400000
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT_HEADER = struct.Struct("<IIQQQQQQ")
#: Where its instructions do.
_START = _ADDRESS + _ELF_HEADER.size + _SEGMENT_HEADER.size
_MFD_EXEC = 0x10  # not in `os`
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_WORD = 8


@dataclass(frozen=True, slots=True)
class Stack:
    """The address of the stack, for what a call gives back."""


@dataclass(frozen=True, slots=True)
class Table:
    """Data made of words: numbers, and addresses of other data."""

    words: "tuple[int | bytes | Table, ...]"


type Argument = int | bytes | Table | Stack


@dataclass(frozen=True, slots=True)
class Call:
    """A system call.

    Args:
        name: as in a machine's `numbers`.
        arguments: numbers; data to point to.
        what: it is meant for, in an error's words.
        least: a result below it is a failure.
        but: the number of an error that is none.
        otherwise: the label where a failure goes on.
    """

    name: str
    arguments: tuple[Argument, ...]
    what: str = ""
    least: int | None = 0
    but: int = 0
    otherwise: str = FAIL


@dataclass(frozen=True, slots=True)
class Label:
    """A place in a program."""

    name: str


@dataclass(frozen=True, slots=True)
class Jump:
    """Go on at a label; `if_none`, only where the last call returned 0, as in the child that it made."""

    to: str
    if_none: bool = False


type Step = Call | Label | Jump


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
    def note(self, value: int) -> bytes:
        """Keep a number where calls leave it alone."""

    @abstractmethod
    def call(self, name: str) -> bytes: ...

    @abstractmethod
    def leave_if_less(self, least: int, distance: int) -> bytes:
        """Go on at a distance from here where the result of a call is less."""

    @abstractmethod
    def leave_if_error(self, error: int, distance: int) -> bytes:
        """The same where it is this error."""

    @abstractmethod
    def leave_if_none(self, distance: int) -> bytes:
        """The same where it is 0."""

    @abstractmethod
    def jump(self, distance: int) -> bytes: ...

    @abstractmethod
    def store_failure(self) -> bytes:
        """Put the error number of a call, and what was noted, on the stack."""


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


_MACHINES: Mapping[str, _Machine] = {"x86_64": _X86(), "aarch64": _Arm()}


class _Assembler:
    """Writes a program, given where its labels and its data are; twice, for that is known after the first.

    Args:
        labels: places in the instructions.
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
        """Write where a program ends: as it should after its last step, or with a failure."""
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
    """The file of a program that takes these steps, for a machine as `uname -m` names it. Pure.

    Raises:
        KeyError: there is none for this one.
    """
    machine = _MACHINES[name]
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
    """A descriptor of a program, to be executed through it.

    Raises:
        OSError: this machine forbids programs in memory.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(NAME, flags | _MFD_EXEC)
    except OSError:  # before Linux 6.3 there is no such flag, and no need of it
        fd = os.memfd_create(NAME, flags)
    # Executed through a descriptor that was opened to read: a program that is open for writing is busy.
    try:
        os.write(fd, content)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # many sandboxes share it
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def spawn(command: Sequence[str], fds: Sequence[int]) -> int:
    """Start a program without a copy of this process on the way: making one and tearing it down again takes
    longer than a program takes to begin. It leads a session of its own and has no environment.

    Args:
        command: the program's path, and what it is told, its name first. No path means one in memory.
        fds: the descriptor that becomes its standard streams, those that become its next ones, and that of a
            program in memory, which has it open as well, at another number.

    Returns:
        its pid, a child of this process.

    Raises:
        OSError: it cannot be run.
    """
    path, *arguments = command
    streams, *others = fds
    # By way of high numbers, so that no target overwrites a source.
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
        # Python ignores these, and what is ignored stays so in programs.
        setsigdef=(signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ),
    )
