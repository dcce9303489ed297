"""What a template has loaded is made immortal, so that its forks share it.

A fork shares every page of its parent until one of them writes to it, and CPython writes to an object
whenever a name comes to mean it: it counts references. From 3.12 on it leaves objects alone whose count is
the highest that 32 bits hold (PEP 683). There is no call for that in Python, so the count is written where
every object begins. A template only ever forks, and frees nothing of this; what a fork makes is counted as
ever.
"""

import ctypes
import gc
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

_IMMORTAL = 0xFFFFFFFF
#: Where that was tried. 3.14 has other fields beside the count.
_TRIED = ((3, 12), (3, 13))


def possible() -> bool:
    """Whether this interpreter is one whose objects begin with a count of that kind."""
    return (
        sys.implementation.name == "cpython"
        and sys.version_info[:2] in _TRIED
        and sys.maxsize > 1 << 32
        and sys.byteorder == "little"
        and not sys.abiflags  # no debug build, and one with the interpreter's lock
    )


def immortalise() -> int:
    """Make all that is loaded and not frozen (`gc.freeze`) immortal, where that is possible. For a process
    that only forks from now on: nothing of it is ever freed.

    Returns:
        how many objects, some more than once.
    """
    if not possible():
        return 0
    count = 0
    for count, one in enumerate(_loaded(), start=1):  # noqa: B007
        ctypes.c_uint32.from_address(id(one)).value = _IMMORTAL
    return count


def _loaded() -> Iterator[Any]:
    """What the collector knows, what that refers to, and the constants of code, of which it knows nothing."""
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
