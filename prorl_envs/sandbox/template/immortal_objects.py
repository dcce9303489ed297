"""Make objects immortal, so that the forks of a template share the memory of all its objects.

A fork shares each page with its parent until one of the two writes to it. CPython counts references, so it
writes to an object at every new reference. Since 3.12 it does not write to objects with the highest count
that 32 bits can store (PEP 683). Python has no call to set the count, so this module writes it at the start
of every object. A template only forks, so it never has to free these objects. Later objects count as usual.
"""

import ctypes
import gc
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

_IMMORTAL = 0xFFFFFFFF
#: Tested versions. In 3.14, other fields are beside the count.
_TESTED = ((3, 12), (3, 13))


def possible() -> bool:
    """Return whether this interpreter's objects start with such a reference count."""
    return (
        sys.implementation.name == "cpython"
        and sys.version_info[:2] in _TESTED
        and sys.maxsize > 1 << 32
        and sys.byteorder == "little"
        and not sys.abiflags  # no debug build and no free-threaded build
    )


def make_immortal() -> int:
    """Make all loaded objects that are not frozen (`gc.freeze`) immortal, if possible. The process must only
    fork afterwards: it never frees these objects.

    Returns:
        The number of objects; some count more than once.
    """
    if not possible():
        return 0
    count = 0
    for count, loaded in enumerate(_loaded(), start=1):  # noqa: B007
        ctypes.c_uint32.from_address(id(loaded)).value = _IMMORTAL
    return count


def _loaded() -> Iterator[Any]:
    """Yield the collector's objects, their referents, and the constants of code, which it does not track."""
    for tracked in gc.get_objects():
        yield tracked
        for referent in gc.get_referents(tracked):
            yield referent
            if isinstance(referent, CodeType):
                yield from _constants(referent)


def _constants(code: CodeType) -> Iterator[Any]:
    yield code.co_consts
    for constant in code.co_consts:
        yield constant
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        elif isinstance(constant, tuple):
            yield from constant
