"""The few system calls that Python does not wrap. Linux, any libc."""

import ctypes
import functools
import os
import struct

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITY_MAX = 63

_AT_FDCWD, _AT_RECURSIVE = ctypes.c_long(-100), 0x8000
#: The same numbers everywhere.
_MOUNT_SETATTR, _OPENAT2 = ctypes.c_long(442), ctypes.c_long(437)
_SIZE_OF_CHANGE, _SIZE_OF_HOW = ctypes.c_ulong(32), ctypes.c_ulong(24)
_RESOLVE_IN_ROOT = 0x10
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)
# Every argument is an unsigned long: passed as a plain int, the upper half would be undefined.
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


def prctl(option: int, argument: int = 0, second: int = 0) -> int:
    """Raises OSError where the kernel refuses."""
    result: int = _libc.prctl(option, argument, second, 0, 0)
    return result if result >= 0 else _checked(result, f"prctl {option}")


def syscall(number: int, *arguments: int) -> int:
    """A system call by its number. Raises OSError where the kernel refuses."""
    values = [ctypes.c_ulong(value) for value in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *values), f"system call {number}")


def mount(source: str, target: str, kind: str, flags: int, settings: str = "") -> None:
    """Mount; see mount(2). Raises OSError where the kernel refuses."""
    strings = (os.fsencode(text) for text in (source, target, kind))
    result = _libc.mount(*strings, ctypes.c_ulong(flags), os.fsencode(settings))
    _checked(result, f"{kind or 'mount'} at {target}")


def mount_attributes(target: str, attributes: int, *, below: bool = False) -> None:
    """Add attributes to the mount at `target`, and to all below it; see mount_setattr(2).

    Raises:
        OSError: the kernel refused; ENOSYS before Linux 5.12.
    """
    change = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if below else 0
    path = ctypes.c_char_p(os.fsencode(target))
    result = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path, ctypes.c_ulong(flags), change, _SIZE_OF_CHANGE)
    _checked(result, f"attributes of the mount at {target}")


def open_in_root(root: str, path: str) -> int:
    """A descriptor of what `path` would be for a process whose root is `root`, links and all; it can be used
    as a path only. See openat2(2).

    Raises:
        OSError: there is no such file.
    """
    how = (ctypes.c_uint64 * 3)(os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT)
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        name = ctypes.c_char_p(os.fsencode(path))
        result = _libc.syscall(_OPENAT2, ctypes.c_long(directory), name, how, _SIZE_OF_HOW)
        return _checked(result, path)
    finally:
        os.close(directory)


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root, and put the present one at `old`. Raises OSError where the kernel refuses."""
    _checked(_libc.pivot_root(os.fsencode(new), os.fsencode(old)), f"pivot_root to {new}")


def detach(target: str) -> None:
    """Take the mount at `target` away, with all below it. Raises OSError where the kernel refuses."""
    _checked(_libc.umount2(os.fsencode(target), _MNT_DETACH), f"umount {target}")


def drop_capabilities() -> None:
    """Empty the ambient, bounding, inheritable, permitted and effective sets of this thread.

    Raises:
        OSError: the kernel refused; the caller must not go on.
    """
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(capabilities()):
        prctl(PR_CAPBSET_DROP, capability)
    _checked(_libc.capset(*capability_sets(0)), "capset")


def capability_sets(low: int) -> tuple[bytes, bytes]:
    """What capset(2) takes for a process to have these capabilities, of the first 32, and no others."""
    return struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), struct.pack("=6I", *(low,) * 3, 0, 0, 0)


@functools.cache
def capabilities() -> int:
    """How many this kernel has. A template calls it once, for all its forks."""
    known = range(_CAPABILITY_MAX + 1)
    return next((number for number in known if not _capability_exists(number)), len(known))


def _capability_exists(capability: int) -> bool:
    result: int = _libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0)
    return result >= 0


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
