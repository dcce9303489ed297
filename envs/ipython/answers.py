"""Comparison of untrusted answers: sets of numbers, expressions, words.

All functions are pure and take bounded time. No answer is evaluated as code or causes an exception, so no
sandbox is needed.
"""

import random
import re
from collections.abc import Sequence

from prorl_envs.env.answers import is_close, parse_number
from prorl_envs.env.expressions import Expression, ExpressionError, Measured, parse_expression

#: Maximum numbers parsed from one answer.
MAX_NUMBERS = 10_000
_SEPARATORS = re.compile(r"(?:[\s,;]|\band\b)+")
#: Brackets of lists in lists; `2(3)` is no list.
_BRACKETS = re.compile(r"(?<![\w.])[\[({]+|[\])}]+(?![\w.])")

#: Expressions are compared at this many seeded points, of which at least `_MIN_DEFINED` must be defined.
_POINTS = 24
_MIN_DEFINED = 8
_REL_TOL = 1e-9
#: Rounding error of double precision, relative to the largest terms of a sum, with a margin for error growth.
_ROUNDING = 1e-12


def parse_numbers(text: str) -> list[float] | None:
    """Parse numbers separated by commas, semicolons, white space or `and`, with or without brackets, also of
    lists in lists; return None if any part is not a number or there are more than `MAX_NUMBERS`."""
    bare = _BRACKETS.sub(" ", text)
    parts = [part for part in _SEPARATORS.split(bare, maxsplit=MAX_NUMBERS) if part]
    values = [parse_number(part) for part in parts]
    return None if None in values else [value for value in values if value is not None]


def same_numbers(
    values: Sequence[float],
    expected: Sequence[float],
    *,
    ordered: bool,
    rel_tol: float,
    abs_tol: float | None,
) -> bool:
    """Return true if both hold the same numbers, equally often, within tolerance.

    Args:
        ordered: False compares as multisets: the sorted numbers, pair by pair. With one absolute tolerance
            this is exact: if any pairing is within tolerance, the sorted pairing is too.
    """
    if len(values) != len(expected):
        return False
    pairs = (
        zip(values, expected, strict=True) if ordered else zip(sorted(values), sorted(expected), strict=True)
    )
    return all(is_close(value, other, rel_tol=rel_tol, abs_tol=abs_tol) for value, other in pairs)


def same_text(text: str, expected: str, *, ignore_case: bool) -> bool:
    """Return true if both are the same words; runs of white space count as one space."""
    given, wanted = " ".join(text.split()), " ".join(expected.split())
    return given.casefold() == wanted.casefold() if ignore_case else given == wanted


def same_expression(
    text: str, expected: str, *, variables: Sequence[str], domain: tuple[float, float], seed: int = 0
) -> bool:
    """Return true if two expressions are the same function on `domain`.

    Both are evaluated at seeded random points, in complex double precision: two different analytic
    expressions agree at all of them with negligible probability. The tolerance is relative, however small
    the value; only 0 is compared within the rounding errors of the answer. Unlike simplification in computer
    algebra, this comparison is cheap for every answer.

    Args:
        text: the answer; unreadable text counts as different.
        expected: the right expression.
        variables: names that both expressions may use.
        domain: open interval that every variable is drawn from.
        seed: seed of the points.

    Raises:
        ExpressionError: `expected` cannot be parsed, or is undefined on most of the domain.
    """
    reference = parse_expression(expected, variables)
    draw = random.Random(seed)
    points = [{name: draw.uniform(*domain) for name in variables} for _ in range(_POINTS)]
    defined = [(point, value) for point in points if (value := reference.measure(point)) is not None]
    if len(defined) < _MIN_DEFINED:
        raise ExpressionError(f"{expected!r} is undefined on most of {domain}")
    try:
        answer = parse_expression(text, variables)
    except ExpressionError:
        return False
    return all(_agree(answer, point, value) for point, value in defined)


def _agree(answer: Expression, point: dict[str, float], expected: Measured) -> bool:
    """Compare values at a point. The tolerance is relative to the expected value; for 0, to its terms."""
    measured = answer.measure(point)
    if measured is None:
        return False
    (value, scale), (right, right_scale) = measured, expected
    tolerance = max(_REL_TOL * abs(right), _ROUNDING * right_scale)
    if abs(right) <= _ROUNDING * right_scale:
        tolerance += _ROUNDING * scale
    return abs(value - right) <= tolerance
