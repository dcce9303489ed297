"""Numbers in untrusted answers: parsing and comparison.

All functions are pure and take bounded time. No answer is evaluated as code or causes an exception, so no
sandbox is needed.
"""

import math
import re
import unicodedata
from fractions import Fraction

#: Maximum characters of an answer that is parsed as one number.
MAX_NUMBER_CHARS = 64
#: Default absolute tolerance if the number 0 is expected.
ZERO_TOL = 1e-9

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?"
_ONE_NUMBER = re.compile(_NUMBER, re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_FRACTION = re.compile(rf"({_NUMBER})\s*/\s*({_NUMBER})", re.ASCII)
_MIXED = re.compile(r"([+-]?)(\d+)\s+(\d+)\s*/\s*(\d+)", re.ASCII)
#: Raised digits and signs; `plain_digits` converts them.
RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"


def plain_digits(text: str) -> str:
    """Return raised and lowered digits and signs, such as `⁻³`, as plain ones."""
    return unicodedata.normalize("NFKC", text).replace("−", "-")


def parse_number(text: str) -> float | None:
    """Parse one finite real number: `42`, `-1.5e3`, `1,234.5`, `3/4`, `2 1/4`; return None for any other
    text. The mathematical minus sign is one, too. An integer stays an integer, with all its digits."""
    text = text.strip().replace("−", "-")
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    if _INTEGER.fullmatch(text):
        return int(text)
    if (mixed := _MIXED.fullmatch(text)) and int(mixed[3]) < int(mixed[4]):
        size = int(mixed[2]) + int(mixed[3]) / int(mixed[4])
        return -size if mixed[1] == "-" else size
    if fraction := _FRACTION.fullmatch(text):
        numerator, denominator = (float(part) for part in fraction.groups())
        value = numerator / denominator if denominator else math.nan
    else:
        value = float(text) if _ONE_NUMBER.fullmatch(text) else math.nan
    return value if math.isfinite(value) else None


def is_close(value: float, expected: float, *, rel_tol: float, abs_tol: float | None) -> bool:
    """Return true if `value` is within `abs_tol`, or within `rel_tol` of the expected magnitude.

    Args:
        abs_tol: None takes `ZERO_TOL` if 0 is expected, else 0: even a tiny expected value is not 0.
    """
    if abs_tol is None:
        abs_tol = 0.0 if expected else ZERO_TOL
    try:
        found, wanted, relative, absolute = map(_exact, (value, expected, rel_tol, abs_tol))
    except ValueError:  # one of them is not finite
        return abs(value - expected) <= max(abs_tol, rel_tol * abs(expected))
    return abs(found - wanted) <= max(absolute, relative * abs(wanted))


def _exact(number: float) -> Fraction:
    """Return a number as it is written: as floats, the difference of 0.4 and 0.3 is not 0.1."""
    return Fraction(number) if isinstance(number, int) else Fraction(repr(float(number)))
