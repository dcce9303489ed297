"""Comparison of two answers by `math-verify`, in a sandbox; imports no module of this package.

The library parses LaTeX with a grammar, and sympy parses plain expressions. A hostile answer can make both
take arbitrarily long. The library's own time limits are alarms, which do not stop a long step in C. So they
are off, and the kernel enforces a limit of processor time instead, and a limit of address space.

Three parts of the library reward wrong answers, and are replaced or not used:

- Its search for an answer in a text: if it cannot parse the whole text, it judges a part of it.
- Its absolute tolerances (15 decimals; six for a decimal number), below which all small numbers are equal.
- Its units with short names, which may be variables. `prorl_envs.envs.math.units` handles these units.
"""

import functools
import json
import logging
import random
import re
import resource
import sys
from collections.abc import Sequence
from typing import Any

_CPU_S = 20
_MEMORY = 2 << 30
#: Relative tolerance of two exact values: far above the error of their evaluation to 100 digits.
_EXACT = "1e-40"
#: Relative tolerance of a decimal for a fraction or root, in addition to the library's absolute tolerance.
_DECIMAL = "5e-5"
_PERCENT = re.compile(r"([+-]?[\d,]*\.?\d+)\s*(?:\\?%|(?:percent(?:age)?|pct)\b)")
_PLAIN = re.compile(r"\*\*|[A-Za-z]{2,}|\d[eE][+-]?\d|[-+*]\s*I\b|\^\s*[-+]")
#: Minimum letters of a unit that the library may drop; and the shorter units that it may drop.
_UNIT_LETTERS = 3
_SHORT_UNITS = frozenset(("mm", "cm", "dm", "km", "kg", "ft", "lb"))
_NAME = re.compile(r"\b[A-Za-z]\b")
_MIXED = re.compile(r"\d+\\[dtc]?frac\{\d+\}\{\d+\}")
#: Functions whose inverse has two names.
_ARCS = ("sin", "cos", "tan", "sinh", "cosh", "tanh")
_NO_UNITS = (
    r"or|and|no|not|if|than|least|most|about|around|over|under|above|below|minus|plus|negative|nearly|almost|"
    r"approx\w*|rough\w*|half|dozen|hundred|thousand|\w*illion"
)
#: Texts of which the library would skip a part: an ellipsis, or a final text that is not a unit.
_SKIPPED = re.compile(
    rf"\\[lc]?dots|\\(?:text|mbox|math)\w*\s*\{{[^{{}}]*(?:\d|\b(?:{_NO_UNITS})s?\b)[^{{}}]*\}}\s*$",
    re.IGNORECASE,
)
_TWO_NUMBERS = re.compile(r"\d\s+[\d.]")
_INEQUALITY = re.compile(r"[<>≤≥≠]|\\(?:[lg]eq?|[lg]t|neq?)(?![A-Za-z])")
_OR, _AND = (
    re.compile(rf"\\(?:text|mbox)\s*\{{\s*,?\s*{word}\s*\}}|\b{word}\b|\\(?:{signs})(?![A-Za-z])")
    for word, signs in (("or", "lor|vee"), ("and", "land|wedge"))
)
#: Points at which two expressions must be equal, and most that are tried: the right one may not be real.
_POINTS, _TRIED_POINTS = 12, 100
_DIGITS = 60
_PLUS_MINUS, _MINUS_PLUS = (re.compile(rf"\\{name}(?![A-Za-z])") for name in ("pm", "mp"))
#: A sign in a tuple or fraction: the grammar would take `(0, \pm 2)` for a tuple of three.
_ENCLOSED_SIGNS = re.compile(r"\A[^=]*[({,][^(){},=]*\\pm(?![A-Za-z])")


def read(text: str, *, plain: bool) -> Any:
    """Return the sympy object of a complete text, or the normalised text if it cannot be parsed.

    Args:
        text: an answer in canonical form.
        plain: whether the text is an expression of `prorl_envs.env.expressions`.
    """
    import sympy
    from latex2sympy2_extended.latex2sympy2 import convert_to_pct, normalize_latex
    from math_verify.parser import LatexExtractionConfig, parse_latex_cached

    if plain and _PLAIN.search(text) and "i" not in _NAME.findall(text):
        names: dict[str, Any] = {name: sympy.Symbol(name, real=True) for name in _NAME.findall(text)}
        names |= {"I": sympy.I, "e": sympy.E, "E": sympy.E, "ln": sympy.log, "abs": sympy.Abs}
        names |= {f"arc{name}": getattr(sympy, f"a{name}") for name in _ARCS}
        names |= {f"log{base}": functools.partial(_log, base) for base in (2, 10)}
        return sympy.parse_expr(text.replace("^", "**"), names)
    if percent := _PERCENT.fullmatch(text):
        return convert_to_pct(sympy.Number(percent[1].replace(",", "")))
    if _SKIPPED.search(text):
        return text
    if _ENCLOSED_SIGNS.search(text) and (values := _of_both_signs(text)) is not None:
        return values
    if _INEQUALITY.search(text) and (_OR.search(text) or _AND.search(text)):
        parts = [[read(part, plain=False) for part in _AND.split(either)] for either in _OR.split(text)]
        if all(isinstance(part, sympy.logic.boolalg.Boolean) for either in parts for part in either):
            joined = sympy.Or(*(sympy.And(*either) for either in parts))
            if _solutions(joined):
                return joined
    normal = normalize_latex(text, config=LatexExtractionConfig().normalization_config)
    if _TWO_NUMBERS.search(normal):  # the grammar would add the two numbers
        return normal
    try:
        return parse_latex_cached(normal)
    except Exception:  # noqa: BLE001  (the grammar raises errors of many types)
        return _of_both_signs(text) or normal


def _log(base: int, value: Any) -> Any:
    from sympy import log

    return log(value, base)


def _of_both_signs(text: str) -> Any:
    r"""Return the values of a text with `\pm`, which the grammar reads in sums only; None for others."""
    from sympy import And, FiniteSet, Ne

    if not _PLUS_MINUS.search(text):
        return None
    texts = [_PLUS_MINUS.sub(one, _MINUS_PLUS.sub(other, text)) for one, other in ("+-", "-+")]
    values = [read(each, plain=False) for each in texts]
    if any(isinstance(value, str) for value in values):
        return None
    if all(isinstance(value, FiniteSet) for value in values):  # lists
        return values[0] | values[1]
    return And(*values) if all(isinstance(value, Ne) for value in values) else FiniteSet(*values)


def refine() -> None:
    r"""Replace parts of the library that reward wrong answers.

    - Comparisons with absolute tolerances, and the comparison of equations, which accepts two empty sets of
      solutions.
    - Units of one or two letters: `2t` and `2ab` end with variables.
    - `\gcd` and `\lcm` of variables, which are 1 and the product.
    - The case of letters, which it ignores: it takes `R^2 - r^2` for 0.
    - Products of numbers, such as `2(3)` and `2\binom{5}{2}`, which it takes for mixed numbers and adds.
    - The unit at the end of a text: in `2 \text{ hours } 30 \text{ minutes}`, the library drops everything
      from the first unit to the last.
    """
    from latex2sympy2_extended import latex2sympy2, math_normalization
    from math_verify import grader
    from math_verify import parser as latex_parser
    from sympy import Expr, Function, MatrixBase, Mul

    units = [
        unit
        for unit in math_normalization.units
        if unit in _SHORT_UNITS or len(re.sub(r"[\W\d_]", "", unit)) >= _UNIT_LETTERS
    ]
    names = "|".join(map(re.escape, units))
    math_normalization.units_regex = re.compile(rf"(\d|\}}|\s)\s*(?:{names})(?:s|es)?\s*$")
    math_normalization.unit_superscript_regex = re.compile(
        r"\\(?:text|mbox)\s*\{(?:[^{}]|\{[^{}]*\})*\}(?:\^\d|\^?\{\^?\d\})?$"
    )
    numeric_eq, solve_and_compare = grader.sympy_numeric_eq, grader.sympy_solve_and_compare

    @functools.wraps(numeric_eq)
    def strict_numeric_eq(gold: Any, answer: Any, *precision: int) -> bool:
        return numeric_eq(gold, answer, *precision) and _relatively_close(gold, answer)

    @functools.wraps(solve_and_compare)
    def strict_solve_and_compare(gold: Any, answer: Any, *precision: int) -> bool:
        return bool(grader.solve(gold, gold.free_symbols)) and solve_and_compare(gold, answer, *precision)

    latex_parser.latex2sympy = functools.partial(
        latex2sympy2.latex2sympy, conversion_config=latex2sympy2.ConversionConfig(lowercase_symbols=False)
    )
    parser = latex2sympy2._Latex2Sympy
    of_numbers, of_factors = parser.handle_gcd_lcm, parser.convert_postfix_list

    @functools.wraps(of_numbers)
    def symbolic_gcd_lcm(self: Any, name: str, values: Sequence[Any]) -> Any:
        if not any(value.free_symbols for value in values):
            return of_numbers(self, name, values)
        if name == "lcm" and len(values) == 2:
            return Mul(*values) / symbolic_gcd_lcm(self, "gcd", values)
        return Function(name)(*sorted(values, key=str))

    @functools.wraps(of_factors)
    def product(self: Any, factors: Sequence[Any], at: int = 0) -> Any:
        first = None
        if at + 1 < len(factors) and not _MIXED.fullmatch("".join(each.getText() for each in factors[at:])):
            first = self.convert_postfix(factors[at])
        if not isinstance(first, Expr | MatrixBase):
            return of_factors(self, factors, at)
        others = product(self, factors, at + 1)
        matrices = any(getattr(value, "is_Matrix", False) for value in (first, others))
        return (self.mat_mul_flat if matrices else self.mul_flat)(first, others)

    parser.handle_gcd_lcm = symbolic_gcd_lcm
    parser.convert_postfix_list = product
    grader.sympy_numeric_eq = strict_numeric_eq
    grader.sympy_solve_and_compare = strict_solve_and_compare


def _relatively_close(gold: Any, answer: Any) -> bool:
    """Return false if the relative difference of two values is above the tolerance.

    Called for values that the library considers equal. True for values that cannot be compared numerically.
    """
    from math_verify.grader import is_atomic_or_pct_atomic
    from sympy import Expr, Float, Integer, Rational

    pair = (gold, answer)
    if not all(isinstance(value, Expr) and not getattr(value, "is_Matrix", False) for value in pair):
        return True  # matrices: compared by their elements
    if all(is_atomic_or_pct_atomic(value, Integer) for value in pair):
        return True  # compared exactly, with or without a percent sign
    decimal = any(is_atomic_or_pct_atomic(value, Float) for value in pair)
    evaluated = [value.doit() for value in pair]
    left, right = [value.xreplace({x: Rational(str(x)) for x in value.atoms(Float)}) for value in evaluated]
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    point = {symbol: Rational(31 + 7 * index, 23 + 5 * index) for index, symbol in enumerate(symbols)}
    left, right = left.xreplace(point), right.xreplace(point)
    if left.is_Rational and right.is_Rational and not decimal:
        return bool(left == right)
    sizes = [abs(value.evalf()) for value in (left, right, left - right)]
    if not all(size.is_comparable for size in sizes):
        return True  # infinite, or with an undefined function
    return bool(sizes[2] <= Float(_DECIMAL if decimal else _EXACT) * max(sizes[:2]))


def is_equal(right: Any, answer: Any) -> bool:
    """Return true if two results of `read` are the same answer."""
    from math_verify import verify
    from sympy import And, Eq, FiniteSet, Or
    from sympy.core.function import AppliedUndef

    right, answer = _with_imaginary_unit(right, _with_variable_of(right, answer))
    if isinstance(answer, Eq) and not isinstance(right, Eq) and not answer.lhs.free_symbols:
        # The library uses the right side of an equation as its value; but `43 = 42` has no value.
        return bool(verify(answer.lhs, answer.rhs, timeout_seconds=None)) and is_equal(right, answer.rhs)
    if isinstance(right, Eq) and isinstance(answer, Eq):
        answer = _with_argument_of(right, answer)
    elif isinstance(right, Eq) and (isinstance(right.lhs, AppliedUndef) or is_equal(right.lhs, right.rhs)):
        right = right.rhs
    wanted, found = _solutions(right), _solutions(answer)
    if wanted and found and (None in (wanted[0], found[0]) or wanted[0] == found[0]):
        return bool(verify(wanted[1], found[1], timeout_seconds=None))
    right, answer = (
        FiniteSet(*one.args) if isinstance(one, And | Or) and isinstance(other, FiniteSet) else one
        for one, other in ((right, answer), (answer, right))
    )
    return _same_where_real(right, answer) or bool(verify(right, answer, timeout_seconds=None))


def _with_variable_of(right: Any, answer: Any) -> Any:
    """Return the answer with the right answer's case of the constant of an integral, `C` or `c`, and of the
    only variable of an equation."""
    from sympy import Eq

    equations = isinstance(right, Eq) and isinstance(answer, Eq)
    ours, theirs = (
        [symbol for symbol in getattr(value, "free_symbols", ()) if equations or symbol.name in ("c", "C")]
        for value in (right, answer)
    )
    if [symbol.name.lower() for symbol in ours] != [symbol.name.lower() for symbol in theirs]:
        return answer
    return answer.xreplace({theirs[0]: ours[0]}) if len(ours) == 1 else answer


def _with_argument_of(right: Any, answer: Any) -> Any:
    """Return an equation such as `f(t) = 2t` with the arguments of the right answer's function."""
    from sympy.core.function import AppliedUndef

    ours, theirs = right.lhs, answer.lhs
    if not all(isinstance(side, AppliedUndef) for side in (ours, theirs)) or ours.func != theirs.func:
        return answer
    if len(ours.args) != len(theirs.args) or not answer.free_symbols.isdisjoint(
        set(ours.args) - set(theirs.args)
    ):
        return answer
    return answer.xreplace(dict(zip(theirs.args, ours.args, strict=True)))


def _with_imaginary_unit(*values: Any) -> Sequence[Any]:
    """Return values with the imaginary unit for `i`.

    The library takes it for a variable. If a value has it, all its variables differ from those of a value
    without it.
    """
    from sympy import I, Symbol
    from sympy.logic.boolalg import BooleanAtom

    symbols = {symbol for value in values for symbol in getattr(value, "free_symbols", ())}
    if not any(symbol.name == "i" or symbol.is_real is False for symbol in symbols):
        return values
    unified = {symbol: I if symbol.name == "i" else Symbol(symbol.name) for symbol in symbols}
    try:
        replaced = [value.xreplace(unified) if hasattr(value, "xreplace") else value for value in values]
    except (TypeError, ValueError):  # `i` is also the index of a sum
        return values
    # An equation may have become true or false.
    return values if any(isinstance(value, BooleanAtom) for value in replaced) else replaced


def _solutions(value: Any) -> tuple[str | None, Any] | None:
    r"""Return the variable, if any, and the set of its values; None for anything but a set, `x \in S`, and
    inequalities whose one side is the variable. Others may only repeat the problem."""
    from sympy import And, Eq, FiniteSet, Or, Set, Symbol
    from sympy.core.relational import Relational

    if isinstance(value, Eq) and isinstance(value.lhs, Symbol) and isinstance(value.rhs, Set):
        return value.lhs.name, value.rhs
    if isinstance(value, Set):
        return None if isinstance(value, FiniteSet) else (None, value)
    if not isinstance(value, Relational | And | Or) or isinstance(value, Eq) or len(value.free_symbols) != 1:
        return None
    (symbol,) = value.free_symbols
    sides = [{relation.lhs, relation.rhs} - {symbol} for relation in value.atoms(Relational)]
    if any(len(rest) != 1 or next(iter(rest)).free_symbols for rest in sides):
        return None
    real = Symbol(symbol.name, real=True)
    try:
        return symbol.name, value.xreplace({symbol: real}).as_set()
    except (AttributeError, NotImplementedError, TypeError, ValueError):  # it holds for all values or none
        return None


def _same_where_real(right: Any, answer: Any) -> bool:
    r"""Return true if two expressions are equal where all parts of the right one are real.

    The library compares them as functions of complex numbers, in which `\sqrt{1/n}` is not `1/\sqrt{n}`.
    """
    from sympy import Derivative, Expr, Float, Function, Limit, Pow, Rational, Symbol
    from sympy.concrete.expr_with_limits import ExprWithLimits

    if not all(isinstance(value, Expr) and not getattr(value, "is_Matrix", 0) for value in (right, answer)):
        return False
    if any(value.has(ExprWithLimits, Limit, Derivative) for value in (right, answer)):  # slow
        return False
    symbols = sorted(right.free_symbols, key=str)
    if not symbols or not all(isinstance(symbol, Symbol) for symbol in symbols):
        return False
    if not answer.free_symbols <= right.free_symbols:
        return False
    steps = [right, *right.atoms(Function, Pow)]
    draw = random.Random(0)
    points = 0
    for _ in range(_TRIED_POINTS):
        point = {symbol: Rational(draw.randint(-400, 400), 101) for symbol in symbols}
        wanted, *others = (step.evalf(_DIGITS, subs=point) for step in steps)
        if not all(step.is_comparable and step.is_finite for step in (wanted, *others)):
            continue
        found = answer.evalf(_DIGITS, subs=point)
        if not found.is_comparable or abs(found - wanted) > Float(_EXACT) * abs(wanted):
            return False
        points += 1
        if points == _POINTS:
            return True
    return False


def main() -> None:
    import math_verify.parser  # noqa: F401  (before the limits)

    logging.disable()
    request = json.load(sys.stdin)
    refine()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + _CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    answer = read(**request["answer"])
    equal = any(is_equal(read(**right), answer) for right in request["right"])
    sys.stdout.write("equal\n" if equal else "other\n")


if __name__ == "__main__":
    main()
