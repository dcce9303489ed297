"""Comparison of two answers by `math-verify`, in a sandbox; imports none of our modules.

The library parses LaTeX with a grammar, and sympy reads plain expressions; a hostile answer can make both
take arbitrarily long. The library's own time limits are alarms, which do not stop a long step in C: they are
off, and the kernel enforces a limit of processor time instead. The address space is limited likewise.

Three parts of the library are not used as they are, since they reward wrong answers:

- Its search for an answer in a text: it judges a part of a text that it cannot parse as a whole.
- Its absolute tolerances (15 decimals; six for a decimal number), below which all small numbers are equal.
- Its units, some of which are variables elsewhere. `prorl_envs.envs.math.units` knows those of short names.
"""

import functools
import json
import logging
import re
import resource
import sys
from typing import Any

_CPU_S = 20
_MEMORY = 2 << 30
#: Relative tolerance of two exact values: far above the error of their evaluation (100 digits).
_EXACT = "1e-40"
#: Relative tolerance of a decimal number for a fraction or root, besides the library's six decimals.
_DECIMAL = "5e-5"
_PERCENT = re.compile(r"([+-]?[\d,]*\.?\d+)\s*(?:\\?%|(?:percent(?:age)?|pct)\b)")
_PLAIN = re.compile(r"\*\*|[A-Za-z]{2,}|\d[eE][+-]?\d")
#: Fewest letters of a unit that the library may drop, and shorter ones.
_UNIT_LETTERS = 3
_SHORT_UNITS = frozenset(("mm", "cm", "dm", "km", "kg", "ft", "lb"))
_NAME = re.compile(r"\b[A-Za-z]\b")
_NO_UNITS = (
    r"or|and|no|not|if|than|least|most|about|around|over|under|above|below|minus|plus|negative|nearly|almost|"
    r"approx\w*|rough\w*|half|dozen|hundred|thousand|\w*illion"
)
#: Texts of which the library would skip a part: an ellipsis, and a text at the end that is no unit.
_SKIPPED = re.compile(
    rf"\\[lc]?dots|\\(?:text|mbox|math)\w*\s*\{{[^{{}}]*(?:\d|\b(?:{_NO_UNITS})s?\b)[^{{}}]*\}}\s*$",
    re.IGNORECASE,
)
_TWO_NUMBERS = re.compile(r"\d\s+[\d.]")


def read(text: str, *, plain: bool) -> Any:
    """Return the sympy object of a whole text, or the normalised text if it is not mathematics.

    Args:
        plain: the text is an expression of the grammar of `prorl_envs.env.expressions`.
    """
    import sympy
    from latex2sympy2_extended.latex2sympy2 import convert_to_pct, normalize_latex
    from math_verify.parser import LatexExtractionConfig, parse_latex_cached

    if plain and _PLAIN.search(text) and not {"i", "I"} & set(_NAME.findall(text)):
        names: dict[str, Any] = {name: sympy.Symbol(name, real=True) for name in _NAME.findall(text)}
        names |= {"e": sympy.E, "E": sympy.E, "ln": sympy.log, "abs": sympy.Abs}
        return sympy.parse_expr(text.replace("^", "**"), names)
    if percent := _PERCENT.fullmatch(text):
        return convert_to_pct(sympy.Number(percent[1].replace(",", "")))
    if _SKIPPED.search(text):
        return text
    normal = normalize_latex(text, config=LatexExtractionConfig().normalization_config)
    if _TWO_NUMBERS.search(normal):  # the grammar adds them
        return normal
    try:
        return parse_latex_cached(normal)
    except Exception:  # noqa: BLE001  (the grammar raises errors of many types)
        return normal


def refine() -> None:
    r"""Replace parts of the library that reward wrong answers.

    - Comparisons that have absolute tolerances, or hold for two empty sets.
    - Units of one or two letters: `2t` and `2ab` end with variables.
    - The unit at the end of a text: the library drops all from the first unit to the last, as in
      `2 \text{ hours } 30 \text{ minutes}`.
    """
    from latex2sympy2_extended import math_normalization
    from math_verify import grader

    words = [
        unit
        for unit in math_normalization.units
        if unit in _SHORT_UNITS or len(re.sub(r"[\W\d_]", "", unit)) >= _UNIT_LETTERS
    ]
    names = "|".join(map(re.escape, words))
    math_normalization.units_regex = re.compile(rf"(\d|\}}|\s)\s*(?:{names})(?:s|es)?\s*$")
    math_normalization.unit_superscript_regex = re.compile(
        r"\\(?:text|mbox)\s*\{(?:[^{}]|\{[^{}]*\})*\}(?:\^\d|\^?\{\^?\d\})?$"
    )
    near, solutions = grader.sympy_numeric_eq, grader.sympy_solve_and_compare

    @functools.wraps(near)
    def numeric(gold: Any, answer: Any, *precision: int) -> bool:
        return near(gold, answer, *precision) and _relatively_close(gold, answer)

    @functools.wraps(solutions)
    def solved(gold: Any, answer: Any, *precision: int) -> bool:
        return bool(grader.solve(gold, gold.free_symbols)) and solutions(gold, answer, *precision)

    grader.sympy_numeric_eq, grader.sympy_solve_and_compare = numeric, solved


def _relatively_close(gold: Any, answer: Any) -> bool:
    """Return false if two values that the library takes for equal differ relative to their size."""
    from math_verify.grader import is_atomic_or_pct_atomic
    from sympy import Expr, Float, Integer, Rational

    pair = (gold, answer)
    if not all(isinstance(value, Expr) and not getattr(value, "is_Matrix", False) for value in pair):
        return True  # matrices: compared by their elements
    if all(is_atomic_or_pct_atomic(value, Integer) for value in pair):
        return True  # compared exactly, with or without a percent sign
    decimal = any(is_atomic_or_pct_atomic(value, Float) for value in pair)
    done = [value.doit() for value in pair]
    left, right = [value.xreplace({x: Rational(str(x)) for x in value.atoms(Float)}) for value in done]
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    point = {symbol: Rational(31 + 7 * index, 23 + 5 * index) for index, symbol in enumerate(symbols)}
    left, right = left.xreplace(point), right.xreplace(point)
    sizes = [abs(value.evalf()) for value in (left, right, left - right)]
    if not all(size.is_comparable for size in sizes):
        return True  # infinite, or with an undefined function
    return bool(sizes[2] <= Float(_DECIMAL if decimal else _EXACT) * max(sizes[:2]))


def is_equal(right: Any, answer: Any) -> bool:
    """Return true if two results of `read` are the same answer."""
    from math_verify import verify
    from sympy import Eq

    if isinstance(answer, Eq) and not isinstance(right, Eq) and not answer.lhs.free_symbols:
        # The library takes the right side of an equation for its value: that of `43 = 42` is none.
        return bool(verify(answer.lhs, answer.rhs, timeout_seconds=None)) and is_equal(right, answer.rhs)
    return bool(verify(right, answer, timeout_seconds=None))


def main() -> None:
    import math_verify.parser  # noqa: F401  (before the limits)

    logging.disable()
    given = json.load(sys.stdin)
    refine()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + _CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    answer = read(**given["answer"])
    equal = any(is_equal(read(**right), answer) for right in given["right"])
    sys.stdout.write("equal\n" if equal else "other\n")


if __name__ == "__main__":
    main()
