"""Memory of a process that a template forked, saved and put into another fork of the same template.

Both forks have the same libraries at the same addresses. So the second becomes the first if it gets its
writable memory, its further mappings, its registers and its signal handlers. The memory is in a file that all
copies map privately: a page is copied when a process writes it, as after a fork. What belongs to the kernel
does not cross: open files, threads, timers.
"""

import bisect
import contextlib
import itertools
import json
import mmap
import os
import re
import resource
from collections.abc import Iterator, Sequence
from typing import Any

from prorl_envs.sandbox.linux.ptrace import Mapping, Thread, read_mappings, read_memory, write_memory

_PAGE = resource.getpagesize()
#: Numbers of system calls (x86-64).
_OPEN, _CLOSE, _MMAP, _MUNMAP, _BRK, _SIGACTION, _CHDIR, _PRCTL = 2, 3, 9, 11, 12, 13, 80, 157
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 1, 2, 0x10, 0x20
_NO_FILE = 2**64 - 1
_PR_GET_TID_ADDRESS = 40
#: Signals with handlers; those of `SIGKILL` and `SIGSTOP` cannot be set.
_SIGNALS = [number for number in range(1, 65) if number not in (9, 19)]
_ACTION_BYTES, _MASK_BYTES = 32, 8
#: Mappings that the kernel makes, equal in all forks.
_KERNELS = ("[vdso]", "[vvar]", "[vvar_vclock]")
#: Mappings that are not replaced.
_FIXED = (*_KERNELS, "[stack]")
#: In /proc/PID/pagemap, the highest byte of a page in use: bit 7 if it is in memory, bit 6 if it is swapped
#: out; bit 5 if its content is that of a file. Bit 2 is that of a guard, which cannot be read (madvise(2)).
#: Gaps below 1 MB belong to a part, so that it is one mapping.
_FREE, _USED = (
    b"".join(b"\\x%02x" % flags for flags in numbers if not flags & 4)
    for numbers in (range(0x40), range(0x40, 0x100))
)
_IN_USE = re.compile(b"[%b](?:[%b]{0,255}[%b])*" % (_USED, _FREE, _USED))
_CHANGED = re.compile(rb"[\x40-\x5f\x80-\x9f\xc0-\xdf]")
#: Bytes of the number at the end of a file.
_SIZE_BYTES = 8
#: Lowest address at which a page is mapped.
_MIN_ADDRESS = 1 << 20
#: Bytes below the stack pointer that belong to the running function.
_RED_ZONE = 256


def save(pid: int, thread: Thread, file: int) -> None:
    """Save a process whose threads are stopped.

    Args:
        thread: its first thread.
        file: descriptor of an empty file, which receives the memory, then a description as JSON and its size.

    Raises:
        OSError: the memory cannot be read.
    """
    mappings = read_mappings(pid)
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pages:  # noqa: PTH123 - templates import no pathlib
        spans = [list(_spans(pid, pages.fileno(), mapping)) for mapping in mappings]
    size = sum(count for found in spans for _, count in found)
    os.ftruncate(file, size)
    place = 0
    with mmap.mmap(file, size) as memory, memoryview(memory) as view:
        for start, count in itertools.chain.from_iterable(spans):
            with view[place : place + count] as part:
                read_memory(pid, start, part)
            place += count
    with _scratch(thread, mappings) as scratch:
        actions = [_action(pid, thread, number, scratch) for number in _SIGNALS]
    general, vectors = thread.state()
    saved = {
        "mappings": mappings,
        "spans": spans,
        "heap_end": thread.call(_BRK, 0),
        "stack_pointer": thread.registers["rsp"],
        "actions": [action.hex() for action in actions],
        "registers": [general.hex(), vectors.hex()],
    }
    description = json.dumps(saved).encode()
    os.pwrite(file, description + len(description).to_bytes(_SIZE_BYTES), size)


def _read_description(file: int) -> dict[str, Any]:
    end = os.fstat(file).st_size - _SIZE_BYTES
    size = int.from_bytes(os.pread(file, _SIZE_BYTES, end))
    description: dict[str, Any] = json.loads(os.pread(file, size, end - size))
    return description


def restore(pid: int, thread: Thread, file: int, own_file: int) -> None:
    """Make a stopped fork of the same template continue as the saved process.

    Args:
        thread: its first and only thread.
        file: descriptor of a file that `save` has written.
        own_file: the process's own descriptor of it, which is closed.

    Raises:
        OSError: a mapping cannot be made; the process must be killed.
    """
    saved = _read_description(file)
    wanted = [Mapping(*mapping) for mapping in saved["mappings"]]
    present = read_mappings(pid)
    if _layout(wanted) != _layout(present):
        raise OSError("the process is not a fork of the same template")
    kept = {mapping for mapping in {*present} & {*wanted} if not mapping.is_writable}
    replaced = {(mapping.start, mapping.end) for mapping in wanted}
    with thread.without_rseq(), _scratch(thread, [*wanted, *present]) as scratch:
        # The C library remembers the thread's number in its memory.
        thread.call(_PRCTL, _PR_GET_TID_ADDRESS, scratch)
        tid_address = int.from_bytes(_read(pid, scratch, 8), "little")
        tid = _read(pid, tid_address, 4)
        # Before its mapping is replaced: then the kernel would refuse to reduce the heap.
        if thread.call(_BRK, saved["heap_end"]) != saved["heap_end"]:
            raise OSError("the heap cannot have the saved size")
        for mapping in present:
            if mapping.path not in (*_FIXED, "[heap]") and (mapping.start, mapping.end) not in replaced:
                thread.call(_MUNMAP, mapping.start, mapping.size)
        place = 0
        for mapping, spans in zip(wanted, saved["spans"], strict=True):
            if mapping.path == "[stack]":
                used = mapping.end - saved["stack_pointer"] + _RED_ZONE
                end = place + sum(count for _, count in spans)
                write_memory(pid, mapping.end - used, os.pread(file, used, end - used))
            elif mapping.path not in _FIXED and mapping not in kept:
                if sum(count for _, count in spans) < mapping.size:  # else all of it was saved
                    _map(pid, thread, mapping, scratch)
                at = place
                for start, count in spans:
                    flags = _MAP_PRIVATE | _MAP_FIXED
                    thread.call(_MMAP, start, count, mapping.protection, flags, own_file, at)
                    at += count
            place += sum(count for _, count in spans)
        write_memory(pid, tid_address, tid)
        for number, action in zip(_SIGNALS, saved["actions"], strict=True):
            write_memory(pid, scratch, bytes.fromhex(action))
            with contextlib.suppress(OSError):  # signals of the C library itself
                thread.call(_SIGACTION, number, scratch, 0, _MASK_BYTES)
        thread.call(_CLOSE, own_file)
    thread.continue_as(*map(bytes.fromhex, saved["registers"]))


def _layout(mappings: Sequence[Mapping]) -> list[tuple[int, str]]:
    """Return the addresses that the kernel chooses at random for each template."""
    return [(mapping.end, mapping.path) for mapping in mappings if mapping.path in _FIXED]


def change_directory(pid: int, thread: Thread, path: str) -> None:
    """Make a stopped process enter a directory.

    Raises:
        OSError: there is no such directory.
    """
    with _scratch(thread, read_mappings(pid)) as scratch:
        write_memory(pid, scratch, os.fsencode(path) + b"\0")
        thread.call(_CHDIR, scratch)


def _spans(pid: int, pages: int, mapping: Mapping) -> Iterator[tuple[int, int]]:
    """Yield the address and size of each part of a mapping whose content must be saved."""
    if mapping.path in _KERNELS or mapping.rights[0] != "r":
        return
    # One byte of each page's entry has the flags.
    flags = os.pread(pages, mapping.size // _PAGE * 8, mapping.start // _PAGE * 8)[7::8]
    if mapping.inode:  # a page that is not in memory is that of the file, which may be gone
        is_changed = mapping.is_writable or not mapping.is_file or _CHANGED.search(flags)
        if is_changed and (size := _readable(pid, mapping)):
            yield mapping.start, size
        return
    for run in _IN_USE.finditer(flags):
        yield mapping.start + run.start() * _PAGE, (run.end() - run.start()) * _PAGE


def _readable(pid: int, mapping: Mapping) -> int:
    """Return the size of the part of a mapping before the end of the mapped file: the rest cannot be read."""

    def is_behind(page: int) -> bool:
        try:
            return not _read(pid, mapping.start + page * _PAGE, 1)
        except OSError:
            return True

    pages = range(mapping.size // _PAGE)
    return mapping.size if not is_behind(pages[-1]) else bisect.bisect(pages, False, key=is_behind) * _PAGE


def _map(pid: int, thread: Thread, mapping: Mapping, scratch: int) -> None:
    """Make a mapping without the parts that were saved."""
    where = (mapping.start, mapping.size, mapping.protection)
    if not mapping.is_file:
        thread.call(_MMAP, *where, _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS, _NO_FILE, 0)
        return
    write_memory(pid, scratch, os.fsencode(mapping.path) + b"\0")
    mode = os.O_RDWR if mapping.is_shared and mapping.is_writable else os.O_RDONLY
    try:
        opened = thread.call(_OPEN, scratch, mode)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {mapping.path}") from error
    flags = _MAP_FIXED | (_MAP_SHARED if mapping.is_shared else _MAP_PRIVATE)
    thread.call(_MMAP, *where, flags, opened, mapping.offset)
    thread.call(_CLOSE, opened)


@contextlib.contextmanager
def _scratch(thread: Thread, avoided: Sequence[Mapping]) -> Iterator[int]:
    """Map a page of memory for arguments of system calls, outside of the mappings."""
    start = _MIN_ADDRESS
    for mapping in sorted(avoided):
        if start + 2 * _PAGE <= mapping.start:
            break
        start = max(start, mapping.end + _PAGE)
    flags = _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS
    thread.call(_MMAP, start, 2 * _PAGE, 0b011, flags, _NO_FILE, 0)
    yield start
    thread.call(_MUNMAP, start, 2 * _PAGE)


def _action(pid: int, thread: Thread, number: int, scratch: int) -> bytes:
    thread.call(_SIGACTION, number, 0, scratch, _MASK_BYTES)
    return _read(pid, scratch, _ACTION_BYTES)


def _read(pid: int, address: int, size: int) -> bytes:
    data = bytearray(size)
    with memoryview(data) as view:
        read_memory(pid, address, view)
    return bytes(data)
