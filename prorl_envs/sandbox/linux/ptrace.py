"""Stopping threads with ptrace(2), and system calls in their name. x86-64 only.

A stopped thread notices nothing: no signal is sent, and a system call that was interrupted continues.
"""

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple, Self

_PTRACE_CONT, _PTRACE_DETACH, _PTRACE_SYSCALL = 7, 17, 24
_PTRACE_GETREGSET, _PTRACE_SETREGSET = 0x4204, 0x4205
_PTRACE_SEIZE, _PTRACE_INTERRUPT = 0x4206, 0x4207
_PTRACE_GET_RSEQ_CONFIGURATION = 0x420F
_PTRACE_O_TRACESYSGOOD = 1
_PTRACE_EVENT_STOP = 128
_SYS_RSEQ, _RSEQ_FLAG_UNREGISTER = 334, 1
#: `struct ptrace_rseq_configuration`: address, size, signature, and flags with padding.
_RSEQ = struct.Struct("=QIIQ")
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
_WALL = 0x40000000
#: Seconds in which a thread stops unless it waits in the kernel, and between two looks.
_STOP_S, _POLL_S = 0.1, 0.0001
#: Register sets: general, and floating point with vectors.
_GENERAL, _VECTORS = 1, 0x202
_REGSET_BYTES = 16384
#: Fields of `struct user_regs_struct` (sys/user.h), in order.
_FIELDS = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
    *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
)
_ARGUMENTS = ("rdi", "rsi", "rdx", "r10", "r8", "r9")
_LAYOUT = struct.Struct(f"={len(_FIELDS)}Q")
_MASK = 2**64 - 1
_MOST_ERRNO = 4095
_SYSCALL = b"\x0f\x05"
#: Key of the address of the kernel's code (include/uapi/linux/auxvec.h), and bytes that are read at once.
_AT_SYSINFO_EHDR, _PAGE = 33, 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long
_VM_ARGUMENTS = (ctypes.c_long, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.argtypes, _call.restype = _VM_ARGUMENTS, ctypes.c_ssize_t


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Thread:
    """Stopped thread. Created by `stop`; all methods are called by the thread that stopped it."""

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self._instruction: int | None = None
        #: Signals that arrived while it was stopped, delivered when it goes on; 0 is none.
        self._signals: list[int] = []
        general = self._read_set(_GENERAL)
        if len(general) != _LAYOUT.size:
            raise OSError("a program of 32 bits")
        self.registers = dict(zip(_FIELDS, _LAYOUT.unpack(general), strict=True))

    @classmethod
    def stop(cls, tid: int) -> Self | None:
        """Stop a thread.

        Returns:
            The thread; None if it waits in the kernel, as after vfork(2). Then it stops when it leaves the
            kernel, and goes on when this process exits.

        Raises:
            ProcessLookupError: it has exited.
            OSError: this process may not trace it.
        """
        if platform.machine() != "x86_64":
            raise OSError(f"not available on {platform.machine()}")
        try:
            _ptrace(_PTRACE_SEIZE, tid, 0, _PTRACE_O_TRACESYSGOOD)
        except PermissionError:
            if state(tid) != "Z":
                raise
            raise ProcessLookupError(errno.ESRCH, "the thread has exited") from None
        _ptrace(_PTRACE_INTERRUPT, tid)
        end = time.monotonic() + _STOP_S
        while not (found := os.waitpid(tid, _WALL | os.WNOHANG))[0]:
            if time.monotonic() > end:
                return None
            time.sleep(_POLL_S)
        if not os.WIFSTOPPED(found[1]):
            raise ProcessLookupError(errno.ESRCH, "the thread has exited")
        thread = cls(tid)
        if found[1] >> 16 != _PTRACE_EVENT_STOP:  # a signal arrived at the same time
            thread._signals.append(os.WSTOPSIG(found[1]))
        return thread

    def resume(self) -> None:
        """Let the thread go on where it was stopped. Does nothing if it has been killed."""
        with contextlib.suppress(ProcessLookupError):
            if self._instruction is not None:
                self._stop_again()
                while self._signals:
                    os.kill(self.tid, self._signals.pop())
            self._write_registers(self.registers)
            _ptrace(_PTRACE_DETACH, self.tid, 0, *self._signals)

    def call(self, number: int, *arguments: int) -> int:
        """Make the thread perform a system call; return its result.

        Raises:
            OSError: the call failed, or the thread has exited.
        """
        if self._instruction is None:
            try:
                self._instruction = _find_syscall(self.tid)
            except PermissionError:
                self._read_set(_GENERAL)  # if it has been killed, this says so
                raise
        registers = {**self.registers, "rax": number, "orig_rax": _MASK, "rip": self._instruction}
        registers.update(zip(_ARGUMENTS, arguments, strict=False))
        self._write_registers(registers)
        for _ in ("entry", "exit"):
            _ptrace(_PTRACE_SYSCALL, self.tid)
            while (number := _await_stop(self.tid)) != _SYSCALL_STOP:
                if number in _FATAL:
                    raise OSError(f"the thread received signal {number}")
                self._signals.append(number)
                _ptrace(_PTRACE_SYSCALL, self.tid)
        result: int = _LAYOUT.unpack(self._read_set(_GENERAL))[_FIELDS.index("rax")]
        if result > _MASK - _MOST_ERRNO:
            raise OSError(2**64 - result, os.strerror(2**64 - result))
        return result

    @contextlib.contextmanager
    def without_rseq(self) -> Iterator[None]:
        """Keep the kernel from writing to the area of restartable sequences, which may be unmapped."""
        buffer = ctypes.create_string_buffer(_RSEQ.size)
        try:
            _ptrace(_PTRACE_GET_RSEQ_CONFIGURATION, self.tid, _RSEQ.size, ctypes.addressof(buffer))
        except OSError:  # a kernel before 5.13
            buffer.raw = bytes(_RSEQ.size)
        address, size, signature, _ = _RSEQ.unpack(buffer.raw[: _RSEQ.size])
        if address:
            self.call(_SYS_RSEQ, address, size, _RSEQ_FLAG_UNREGISTER, signature)
        yield
        if address:
            self.call(_SYS_RSEQ, address, size, 0, signature)

    def state(self) -> tuple[bytes, bytes]:
        """Return its registers, for `continue_as`: general, and vectors."""
        return _LAYOUT.pack(*self.registers.values()), self._read_set(_VECTORS)

    def continue_as(self, general: bytes, vectors: bytes) -> None:
        """Set registers from `state` of another thread, which was waiting in a system call: here the call
        returns EINTR, after which programs repeat it."""
        self._write_set(_VECTORS, vectors)
        self.registers = dict(zip(_FIELDS, _LAYOUT.unpack(general), strict=True))
        if self.registers["orig_rax"] != _MASK:
            self.registers |= {"rax": -errno.EINTR & _MASK, "orig_rax": _MASK}

    def _stop_again(self) -> None:
        """Stop the thread, after calls, where the kernel delivers signals. From there, it decides by the
        registers and the signals whether the interrupted system call is repeated or returns EINTR."""
        _ptrace(_PTRACE_INTERRUPT, self.tid)
        _ptrace(_PTRACE_CONT, self.tid)
        self._signals.append(_await_stop(self.tid))

    def _write_registers(self, registers: dict[str, int]) -> None:
        self._write_set(_GENERAL, _LAYOUT.pack(*registers.values()))

    def _read_set(self, kind: int) -> bytes:
        buffer = ctypes.create_string_buffer(_REGSET_BYTES)
        span = _Span(ctypes.addressof(buffer), _REGSET_BYTES)
        _ptrace(_PTRACE_GETREGSET, self.tid, kind, ctypes.addressof(span))
        return buffer.raw[: span.size]

    def _write_set(self, kind: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        span = _Span(ctypes.addressof(buffer), len(data))
        _ptrace(_PTRACE_SETREGSET, self.tid, kind, ctypes.addressof(span))


def read_memory(pid: int, address: int, buffer: memoryview) -> None:
    """Fill a writable buffer from the memory of a process.

    Raises:
        OSError: a part cannot be read.
    """
    try:
        _transfer(_libc.process_vm_readv, pid, address, (ctypes.c_char * len(buffer)).from_buffer(buffer))
    except OSError as error:  # frames of a traceback would keep the buffer from being closed
        raise error.with_traceback(None) from None


def write_memory(pid: int, address: int, data: bytes) -> None:
    """Write into the memory of a process, which must be writable there.

    Raises:
        OSError: a part cannot be written.
    """
    _transfer(_libc.process_vm_writev, pid, address, ctypes.create_string_buffer(data, len(data)))


def _transfer(
    call: "ctypes._FuncPointer", pid: int, address: int, local: "ctypes.Array[ctypes.c_char]"
) -> None:
    done, size = 0, ctypes.sizeof(local)
    while done < size:
        here = _Span(ctypes.addressof(local) + done, size - done)
        there = _Span(address + done, size - done)
        count = call(pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"memory at {address + done:#x}: {os.strerror(number)}")
        done += count


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, tid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request:#x}: {os.strerror(number)}")


def _await_stop(tid: int) -> int:
    """Wait until a traced thread stops; return the signal that it reports, 0 if it was interrupted."""
    _, status = os.waitpid(tid, _WALL)
    if not os.WIFSTOPPED(status):
        raise ProcessLookupError(errno.ESRCH, "the thread has exited")
    return 0 if status >> 16 == _PTRACE_EVENT_STOP else os.WSTOPSIG(status)


def _find_syscall(pid: int) -> int:
    """Return the address of an instruction that makes a system call, in the code that the kernel maps."""
    with open(f"/proc/{pid}/auxv", "rb") as file:  # noqa: PTH123 - templates import no pathlib
        values: dict[int, int] = dict(struct.iter_unpack("=QQ", file.read()))
    if not values:
        raise ProcessLookupError(errno.ESRCH, "the process has exited")
    place, code = values[_AT_SYSINFO_EHDR], bytearray(_PAGE)
    while True:  # the read fails at the end, or if the program has removed this code
        read_memory(pid, place, memoryview(code))
        if (offset := code.find(_SYSCALL)) >= 0:
            return place + offset
        place += _PAGE


class Mapping(NamedTuple):
    """Line of /proc/PID/maps."""

    start: int
    end: int
    rights: str
    offset: int
    inode: int
    path: str

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def protection(self) -> int:
        return sum(1 << bit for bit, right in enumerate("rwx") if self.rights[bit] == right)

    @property
    def is_writable(self) -> bool:
        return self.rights[1] == "w"

    @property
    def is_shared(self) -> bool:
        return self.rights[3] == "s"

    @property
    def is_file(self) -> bool:
        """True if a file with this path has its content, unless a page was changed."""
        return self.path.startswith("/") and not self.path.endswith(" (deleted)")


def read_mappings(pid: int) -> list[Mapping]:
    """Return the mappings of a process in the order of their addresses."""
    found = []
    # A path may have any character but a line feed.
    with open(f"/proc/{pid}/maps", errors="surrogateescape", newline="\n") as lines:  # noqa: PTH123
        for line in lines:
            area, rights, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
            start, _, end = area.partition("-")
            numbers = int(start, 16), int(end, 16), rights, int(offset, 16), int(inode)
            if path != ["[vsyscall]"]:
                found.append(Mapping(*numbers, "".join(path)))
    return found


def state(tid: int) -> str:
    """Return a thread's state as proc(5) does: "T" if a signal has stopped it, "Z" if it has exited."""
    with open(f"/proc/{tid}/stat", "rb") as file:  # noqa: PTH123
        return file.read().rpartition(b") ")[2][:1].decode()


def threads(pid: int) -> Iterator[int]:
    """Yield the threads of a process, the first one first."""
    yield from sorted(map(int, os.listdir(f"/proc/{pid}/task")))  # noqa: PTH208
