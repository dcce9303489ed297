"""Immortal objects: the forks of a template share the memory of all objects that it has loaded.

A fork shares every page of its parent until one of them writes to it, and CPython writes to an object at
every new reference: it counts references. Since 3.12 it does not write to objects whose count is the highest
that 32 bits hold (PEP 683). Python has no call to set this count, so it is written at the start of every
object. A template only ever forks and frees none of these objects; objects that a fork creates are counted as
usual.
"""

import ctypes
import gc
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

_IMMORTAL = 0xFFFFFFFF
#: Tested versions. 3.14 has other fields beside the count.
_TRIED = ((3, 12), (3, 13))


def possible() -> bool:
    """Return whether this interpreter's objects start with such a reference count."""
    return (
        sys.implementation.name == "cpython"
        and sys.version_info[:2] in _TRIED
        and sys.maxsize > 1 << 32
        and sys.byteorder == "little"
        and not sys.abiflags  # no debug build and no free-threaded build
    )


def immortalise() -> int:
    """Make all loaded objects that are not frozen (`gc.freeze`) immortal, if possible. For a process that
    only forks from now on: none of these objects is ever freed.

    Returns:
        the number of objects, some counted more than once.
    """
    if not possible():
        return 0
    count = 0
    for count, one in enumerate(_loaded(), start=1):  # noqa: B007
        ctypes.c_uint32.from_address(id(one)).value = _IMMORTAL
    return count


def _loaded() -> Iterator[Any]:
    """Yield the collector's objects, their referents, and the constants of code, which it does not know."""
    for one in gc.get_objects():
        yield one
        for other in gc.get_referents(one):
            yield other
            if isinstance(other, CodeType):
                yield from _constants(other)


def _constants(code: CodeType) -> Iterator[Any]:
    yield code.co_consts
    for one in code.co_consts:
        yield one
        if isinstance(one, CodeType):
            yield from _constants(one)
        elif isinstance(one, tuple):
            yield from one
