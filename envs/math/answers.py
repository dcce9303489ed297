"""Part of the answer comparison that needs no library. Pure and bounded."""

import re
from collections.abc import Sequence
from fractions import Fraction

from prorl_envs.env.answers import parse_number
from prorl_envs.env.expressions import ExpressionError, parse_expression

#: Longest answer that is judged.
MAX_CHARS = 2_000

_LETTER = re.compile(r"[A-Za-z_]\w*")
_OPERATORS = (r"\int", r"\iint", r"\oint", r"\sum", r"\prod", r"\lim", r"\det", r"\partial", r"\frac{d}{d")
_NAMES = frozenset(("pi", "e", "E", "I"))

_SPACE = r"(?:\s|~|(?<!\\)\\(?:[,;:! ]|q?quad\b))+"
_WIDE_SPACE = re.compile(r"(?:~|(?<!\\)\\(?:[,;: ]|q?quad\b))+")
_THOUSANDS = re.compile(rf"(?<![\w.,])\d{{1,3}}(?:(?:{_SPACE}|\{{,\}})\d{{3}})+(?![\d/])")
_MIXED = re.compile(rf"(?<![\w.^_{{\\])(\d+){_SPACE}(\d+)\s*/\s*(\d+)(?![\w.^({{/])")
_TWO_DIGITS = re.compile(r"\\([dt]?frac|[dt]?binom)\s*(\d)\s*(\d)")
_BASE = re.compile(r"[\d.,\s]*\d\s*_\s*\{?\s*(?:\\text\{)?(\d+|[a-z]+)\}*")


def canonical(answer: str) -> str:
    r"""Return an answer with one spelling of numbers: `1 000` is `1000`, `2 1/4` is `2\frac{1}{4}`."""
    text = _TWO_DIGITS.sub(r"\\\1{\2}{\3}", answer.replace("−", "-"))
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    return _MIXED.sub(_mixed, _WIDE_SPACE.sub(" ", text))


def quick(answer: str, right: str) -> bool | None:
    """Return whether an answer is right if that is obvious; None if the library must decide.

    Two numbers are compared exactly: a problem states if its answer should be rounded.
    """
    answer, right = canonical(answer), canonical(right)
    if _squeezed(answer) == _squeezed(right):
        return True
    left, expected = _exact(answer), _exact(right)
    if left is not None and expected is not None:
        return left == expected
    bases = [match[1] for text in (answer, right) if (match := _BASE.fullmatch(text))]
    return False if len(set(bases)) == 2 else None  # the library ignores the bases of numbers


def unfinished(answer: str, right: Sequence[str]) -> bool:
    """Return true if no right answer contains all operators (integral, sum, limit) of the answer."""
    left = {name for name in _OPERATORS if name in answer}
    return not any(left <= {name for name in _OPERATORS if name in text} for text in right)


def is_plain(text: str) -> bool:
    """Return true if a text is an expression in the plain grammar, over one-letter variables."""
    letters = {name for name in _LETTER.findall(text) if len(name) == 1} - _NAMES
    try:
        parse_expression(text, sorted(letters))
    except ExpressionError:
        return False
    return True


def _mixed(match: re.Match[str]) -> str:
    whole, above, below = match.groups()
    return rf"{whole}\frac{{{above}}}{{{below}}}" if int(above) < int(below) else match[0]


def _exact(text: str) -> Fraction | None:
    """Return a decimal number exactly as written, so that long ones are distinguished; None for a fraction:
    the library decides how many digits of its decimals suffice."""
    if "/" in text or parse_number(text) is None:
        return None
    return Fraction(text.strip().replace(",", ""))


def _squeezed(text: str) -> str:
    text = text.replace(r"\left", "").replace(r"\right", "")
    text = re.sub(rf"(?<=\d){_SPACE}(?=\d)", "\0", text)  # `4 2` is not 42
    text = re.sub(_SPACE, "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    return re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", text)
