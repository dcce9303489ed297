"""Conversion of plain Python values to JSON and back, on the host and in the grading sandbox.

Imports no module of this package: in the sandbox, its text is placed before that of `runner.py`.
"""

import itertools
import math
from typing import Any

#: Maximum nesting of a value, and maximum items that are taken from an iterator.
_DEPTH, _ITEMS = 100, 1_000_000
#: Larger integers are encoded as hexadecimal texts.
_SMALL = 2**63


class NotPlain(TypeError):
    """Failure to transfer a value, because it is not plain."""


def encode(value: Any, depth: int = 0) -> Any:
    """Encode a plain value with its type as JSON.

    Raises:
        NotPlain: the value is not plain.
        ValueError: the value is nested too deep.
    """
    kind = type(value)
    if depth > _DEPTH:
        raise ValueError("nested too deep")
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else {"t": "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"t": "float", "v": repr(value)}
    if kind is list:
        return [encode(item, depth + 1) for item in value]
    if kind in (tuple, set, frozenset):
        return {"t": kind.__name__, "v": [encode(item, depth + 1) for item in value]}
    if kind is dict:
        pairs = [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]
        return {"t": "dict", "v": pairs}
    if kind in (bytes, bytearray):
        return {"t": "bytes", "v": bytes(value).hex()}
    if kind is complex:
        return {"t": "complex", "v": [repr(value.real), repr(value.imag)]}
    return _encode_other(value, depth)


def _encode_other(value: Any, depth: int) -> Any:
    """Encode instances of subclasses, numpy's values and iterators as similar plain values."""
    if hasattr(value, "tolist"):
        return encode(value.tolist(), depth + 1)
    bases: tuple[Any, ...] = (int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
    for base in bases:
        if isinstance(value, base):
            return encode(base(value), depth + 1)
    if hasattr(value, "__next__") or isinstance(value, range):
        return encode(list(itertools.islice(value, _ITEMS)), depth + 1)
    raise NotPlain(f"a {type(value).__name__} is not a plain value")


def decode(value: Any, depth: int = 0) -> Any:
    """Decode a value that `encode` encoded. `value` comes from JSON, and is hostile.

    Raises:
        ValueError: `value` is not a valid encoding.
    """
    if depth > _DEPTH + 4:
        raise ValueError("nested too deep")
    if isinstance(value, list):
        return [decode(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        return _decode_tagged(value["t"], value["v"], depth + 1)
    except (KeyError, TypeError) as error:  # TypeError also for an unhashable key or item of a set
        raise ValueError(f"not an encoded value: {error}") from error


def _decode_tagged(kind: str, value: Any, depth: int) -> Any:
    match kind:
        case "int":
            return int(value, 16)
        case "float":
            return float(value)
        case "complex":
            return complex(float(value[0]), float(value[1]))
        case "bytes":
            return bytes.fromhex(value)
        case "dict":
            return {decode(key, depth): decode(item, depth) for key, item in value}
        case "tuple" | "set" | "frozenset":
            make = {"tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return make(decode(item, depth) for item in value)
    raise ValueError(f"values have no type {kind!r}")
