"""Part of the answer comparison that needs no library. Pure and bounded."""

import re
from collections.abc import Sequence
from fractions import Fraction

from prorl_envs.env.answers import parse_number, same_expression
from prorl_envs.env.expressions import ExpressionError, parse_expression

#: Longest answer that is judged.
MAX_CHARS = 2_000

_LETTER = re.compile(r"[A-Za-z_]\w*")
_OPERATORS = (r"\int", r"\iint", r"\oint", r"\sum", r"\prod", r"\lim", r"\det", r"\partial", r"\frac{d}{d")
_NAMES = frozenset(("pi", "e", "E", "I"))


def quick(answer: str, right: str) -> bool | None:
    """Return whether an answer is right if that is obvious; None if the library must decide.

    Two numbers are compared exactly: a problem states if its answer should be rounded. Two plain expressions
    that are the same function are the same answer; other pairs may still be.
    """
    if _squeezed(answer) == _squeezed(right):
        return True
    left, expected = _exact(answer), _exact(right)
    if left is not None and expected is not None:
        return left == expected
    try:
        letters = sorted({name for name in _LETTER.findall(right) if len(name) == 1} - _NAMES)
        parse_expression(right, letters)
        if same_expression(answer.replace("^", "**"), right, variables=letters, domain=(0.5, 2.0)):
            return True
    except ExpressionError:
        pass
    return None


def unfinished(answer: str, right: Sequence[str]) -> bool:
    """Return true if no right answer contains all operators (integral, sum, limit) of the answer."""
    left = {name for name in _OPERATORS if name in answer}
    return not any(left <= {name for name in _OPERATORS if name in text} for text in right)


def _exact(text: str) -> Fraction | None:
    """Return a decimal number exactly as written, so that long ones are distinguished; None for a fraction:
    the library decides how many digits of its decimals suffice."""
    if "/" in text or parse_number(text) is None:
        return None
    return Fraction(text.strip().replace(",", ""))


def _squeezed(text: str) -> str:
    for command in (r"\left", r"\right", r"\!", r"\,", r"\;", r"\ "):
        text = text.replace(command, "")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", text)
    return "".join(text.split())
