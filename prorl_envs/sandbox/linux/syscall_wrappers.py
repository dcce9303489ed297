"""System calls that Python does not provide. Linux, any libc."""

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

#: Capabilities of an emulated root, in the user namespace of its sandbox alone: they apply to files of this
#: user, the only one that the namespace knows. CAP_DAC_OVERRIDE overwrites read-only files, which package
#: managers do; CAP_SYS_CHROOT changes the root directory, as their scripts for an installation elsewhere do.
ROOT_CAPABILITIES = 1 << 1 | 1 << 18

#: Equal on every architecture.
_OPEN_TREE, _MOVE_MOUNT = 428, 429
_AT_FDCWD = -100
_MNT_DETACH = 2
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4

_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITY_MAX = 63

_libc = ctypes.CDLL(None, use_errno=True)
# Every argument is an unsigned long: the upper half of a plain int would be undefined.
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


def prctl(option: int, argument: int = 0, second: int = 0) -> int:
    """Call prctl(2). Raises OSError if the kernel refuses."""
    result: int = _libc.prctl(option, argument, second, 0, 0)
    return result if result >= 0 else _checked(result, f"prctl {option}")


def syscall(number: int, *arguments: int) -> int:
    """Make a system call by its number. Raises OSError if the kernel refuses."""
    values = [ctypes.c_ulong(value) for value in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *values), f"system call {number}")


def mount(source: str, target: str, kind: str, flags: int, settings: str = "") -> None:
    """Call mount(2). Raises OSError if the kernel refuses."""
    strings = (os.fsencode(text) for text in (source, target, kind))
    result = _libc.mount(*strings, ctypes.c_ulong(flags), os.fsencode(settings))
    _checked(result, f"{kind or 'mount'} at {target}")


def unmount(path: str) -> None:
    """Remove the mount at `path`, also if it is in use. Raises OSError."""
    _checked(_libc.umount2(os.fsencode(path), _MNT_DETACH), f"unmount {path}")


def open_tree(path: str) -> int:
    """Return a descriptor of a copy of the mount at `path`, for `attach_tree`. Raises OSError."""
    arguments = (ctypes.c_long(_OPEN_TREE), ctypes.c_long(_AT_FDCWD), ctypes.c_char_p(os.fsencode(path)))
    flags = ctypes.c_ulong(_OPEN_TREE_CLONE | os.O_CLOEXEC)
    return _checked(_libc.syscall(*arguments, flags), f"open_tree {path}")


def attach_tree(tree: int, path: str) -> None:
    """Mount a descriptor of `open_tree` at `path`. Raises OSError."""
    target = ctypes.c_char_p(os.fsencode(path))
    flags = ctypes.c_ulong(_MOVE_MOUNT_F_EMPTY_PATH)
    arguments = (ctypes.c_long(_MOVE_MOUNT), ctypes.c_long(tree), ctypes.c_char_p(b""))
    _checked(_libc.syscall(*arguments, ctypes.c_long(_AT_FDCWD), target, flags), f"mount at {path}")


def drop_capabilities(*, keep: int = 0) -> None:
    """Empty the ambient, bounding, inheritable, permitted and effective sets of this thread.

    Args:
        keep: mask of capabilities that remain in all but the ambient set.

    Raises:
        OSError: the kernel refused; the caller must not continue.
    """
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(capabilities()):
        if not keep & 1 << capability:
            prctl(PR_CAPBSET_DROP, capability)
    _checked(_libc.capset(*capability_sets(keep)), "capset")


def capability_sets(low: int) -> tuple[bytes, bytes]:
    """Return arguments of capset(2) that set exactly these capabilities, of the first 32."""
    return struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), struct.pack("=6I", *(low,) * 3, 0, 0, 0)


@functools.cache
def capabilities() -> int:
    """Return the number of this kernel's capabilities. Cached: a template calls it once for its forks."""
    numbers = range(_CAPABILITY_MAX + 1)
    return next((number for number in numbers if not _capability_exists(number)), len(numbers))


def _capability_exists(capability: int) -> bool:
    result: int = _libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0)
    return result >= 0


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
