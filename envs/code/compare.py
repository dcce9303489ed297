"""Comparison of outputs and results with the expected ones. Pure, total and bounded; evaluates no code."""

import json
import math
import re
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal
from typing import Any

from prorl_envs.envs.code.task import FunctionCase, FunctionTests, StdioTests, TextRule, ValueRule

#: Longest token that is parsed as a number.
_MAX_NUMBER = 400
#: A decimal number. (`float` would also accept `1_0`, and digits of other scripts.)
_NUMBER = re.compile(
    r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf(?:inity)?|nan)", re.ASCII | re.IGNORECASE
)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_LINE_END = re.compile(r"\r\n?|\n")


def same_output(output: str, expected: str, tests: StdioTests) -> bool:
    """Return true if a program printed the expected output."""
    match tests.compare:
        case TextRule.EXACT:
            return output == expected
        case TextRule.LINES:
            return _lines(output) == _lines(expected)
        case TextRule.NUMBERS:
            lines, wanted = (_lines(text.lstrip("\r\n")) for text in (output, expected))
            return len(lines) == len(wanted) and all(
                a == b or _same_numbers(a, b, tests) for a, b in zip(lines, wanted, strict=True)
            )
        case TextRule.TOKENS:
            return output.split() == expected.split()
        case TextRule.FLOATS:
            left, right = output.split(), expected.split()
            return len(left) == len(right) and all(
                a == b or _close_tokens(a, b, tests) for a, b in zip(left, right, strict=True)
            )


def same_result(value: Any, case: FunctionCase, tests: FunctionTests) -> bool:
    """Return true if a call returned the expected result.

    Args:
        value: the returned value, made of plain values; hostile.
    """
    return any(_same_value(value, right, tests) for right in (case.expected, *case.alternatives))


def _same_value(value: Any, expected: Any, tests: FunctionTests) -> bool:
    try:
        if tests.compare is ValueRule.UNORDERED:
            return _same_items(value, expected)
        if tests.compare is ValueRule.FLOATS:
            return _close(value, expected, tests)
        return _equal(value, expected)
    except (RecursionError, OverflowError, ValueError):  # ValueError: a key with too many digits
        return False


def _lines(text: str) -> list[str]:
    # `splitlines` would also split at form feeds and Unicode separators, which do not end a line.
    return [line.rstrip() for line in _LINE_END.split(text.rstrip())]


def _same_numbers(line: str, expected: str, tests: StdioTests) -> bool:
    """Return true if two lines hold the same numbers: exactly, unless a decimal is expected."""
    left, right = line.split(), expected.split()
    return len(left) == len(right) and all(
        _same_decimal(a, b) or (not _INTEGER.fullmatch(b) and _close_tokens(a, b, tests))
        for a, b in zip(left, right, strict=True)
    )


def _same_decimal(left: str, right: str) -> bool:
    if not _are_numbers(left, right):
        return False
    try:
        return Decimal(left) == Decimal(right)
    except ArithmeticError:  # an exponent beyond all bounds
        return False


def _close_tokens(left: str, right: str, tests: StdioTests) -> bool:
    if not _are_numbers(left, right):
        return False
    kind = int if _INTEGER.fullmatch(left) and _INTEGER.fullmatch(right) else float
    return _near(kind(left), kind(right), tests.rel_tol, tests.abs_tol)


def _are_numbers(*tokens: str) -> bool:
    return all(len(token) <= _MAX_NUMBER and _NUMBER.fullmatch(token) for token in tokens)


def _near(value: float, expected: float, rel_tol: float, abs_tol: float) -> bool:
    if isinstance(value, int) and isinstance(expected, int):  # without rounding errors
        return abs(value - expected) <= abs_tol
    value, expected = float(value), float(expected)
    if not (math.isfinite(value) and math.isfinite(expected)):
        return value == expected or (math.isnan(value) and math.isnan(expected))
    return abs(value - expected) <= max(abs_tol, rel_tol * abs(expected))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _canonical(value: Any) -> str:
    """Return a text that is the same for two values if and only if they are equal.

    Expected values are JSON, so a tuple equals a list, and a key equals its JSON form. Numbers are equal as
    in Python, but NaN equals NaN. A set equals only a set. Comparison by hashes would be faster, but a
    hostile value can make all its hashes collide.
    """
    if _is_list(value):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(sorted(f'{_key(key)!r}:{_canonical(item)}' for key, item in value.items()))}}}"
    if isinstance(value, Set):
        return f"{{{','.join(sorted(map(_canonical, value)))}}}set"
    return _canonical_number(value) if isinstance(value, int | float | complex) else repr(value)


def _canonical_number(value: complex) -> str:
    if isinstance(value, complex):
        if value.imag:
            return f"{_canonical_number(value.real)}+{_canonical_number(value.imag)}j"
        value = value.real
    if isinstance(value, int) or value.is_integer():
        return hex(int(value))  # decimal digits of large numbers take quadratic time
    return repr(value)


def _key(key: Any) -> str:
    """Return the JSON form of a dictionary's key."""
    if isinstance(key, bool) or key is None:
        return json.dumps(key)
    return str(key)


def _equal(value: Any, expected: Any) -> bool:
    return _canonical(value) == _canonical(expected)


def _same_items(value: Any, expected: Any) -> bool:
    """Compare the items of two lists in any order. A set counts as the list of its items."""
    if _is_items(value) and _is_items(expected):
        return sorted(map(_canonical, value)) == sorted(map(_canonical, expected))
    return _equal(value, expected)


def _is_items(value: Any) -> bool:
    return _is_list(value) or isinstance(value, Set)


def _close(value: Any, expected: Any, tests: FunctionTests) -> bool:
    if _is_list(value) and _is_list(expected):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(_close(a, b, tests) for a, b in pairs)
    if isinstance(value, Mapping) and isinstance(expected, Mapping):
        left, right = ({_key(key): item for key, item in each.items()} for each in (value, expected))
        return (
            len(value) == len(expected)
            and left.keys() == right.keys()
            and all(_close(left[key], right[key], tests) for key in left)
        )
    if _is_number(value) and _is_number(expected):
        return value == expected or _near(value, expected, tests.rel_tol, tests.abs_tol)
    return _equal(value, expected)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
