"""Parser of mathematical expressions from hostile text; never evaluates text as code.

    expression = term (("+" | "-") term)*
    term       = factor (("*" | "/") factor)*
    factor     = ("+" | "-") factor | power
    power      = atom (("**" | "^") factor)?
    atom       = number | constant | variable | function "(" expression ("," expression)? ")"
               | "(" expression ")"

Computer algebra systems print elementary functions in this grammar; numpy's names of them are known, too.
Parsing takes time linear in the text, evaluation a fixed time per node: numbers are complex doubles, so no
power can grow without bound.
"""

import cmath
import math
import re
from collections.abc import Callable, Mapping, Sequence

#: Longest expression, in characters, and deepest nesting.
MAX_CHARS = 2_000
MAX_DEPTH = 60
#: Values of this size and above count as undefined.
MAX_SIZE = 1e300
#: Relative change of an argument, to estimate the rounding error of a function.
_STEP = 1e-8

_TOKEN = re.compile(r"\s*(?:(?P<number>\d+\.?\d*(?:[eE][+-]?\d{1,4})?|\.\d+(?:[eE][+-]?\d{1,4})?)"
                    r"|(?P<name>[A-Za-z_]\w*)|(?P<sign>\*\*|[-+*/^(),]))", re.ASCII)  # fmt: skip

type Point = Mapping[str, float]
#: A value, and the scale of its rounding error. The scale is larger than the value if terms cancel.
type Measured = tuple[complex, float]
type Node = Callable[[Point], Measured]


def _factorial(z: complex) -> complex:
    if z.imag:
        raise ValueError("factorial of a complex number")
    return complex(math.gamma(z.real + 1))


_CONSTANTS: dict[str, complex] = {"pi": math.pi, "e": math.e, "E": math.e, "I": 1j}
_FUNCTIONS: dict[str, Callable[..., complex]] = {
    "sqrt": cmath.sqrt, "exp": cmath.exp, "log": cmath.log, "ln": cmath.log,
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan,
    "asin": cmath.asin, "acos": cmath.acos, "atan": cmath.atan,
    "sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh,
    "asinh": cmath.asinh, "acosh": cmath.acosh, "atanh": cmath.atanh,
    "sec": lambda z: 1 / cmath.cos(z), "sech": lambda z: 1 / cmath.cosh(z),
    "csc": lambda z: 1 / cmath.sin(z), "csch": lambda z: 1 / cmath.sinh(z),
    "cot": lambda z: 1 / cmath.tan(z), "coth": lambda z: 1 / cmath.tanh(z),
    "asec": lambda z: cmath.acos(1 / z), "acsc": lambda z: cmath.asin(1 / z),
    "acot": lambda z: cmath.atan(1 / z),
    "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan,
    "arcsinh": cmath.asinh, "arccosh": cmath.acosh, "arctanh": cmath.atanh,
    "log2": lambda z: cmath.log(z) / math.log(2), "log10": cmath.log10, "cbrt": lambda z: z ** (1 / 3),
    "abs": lambda z: complex(abs(z)), "Abs": lambda z: complex(abs(z)), "factorial": _factorial,
}  # fmt: skip
_TWO_ARGUMENTS = frozenset({"log"})


class ExpressionError(ValueError):
    """Error: the text is not an expression of this grammar."""


class Expression:
    """Parsed expression; call it with a point to get its value there."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __call__(self, point: Point) -> complex | None:
        """Return the value at `point` (variable name to real value); None if it is undefined or too large."""
        measured = self.measure(point)
        return None if measured is None else measured[0]

    def measure(self, point: Point) -> Measured | None:
        """Return the value at `point` and the scale of its rounding error; None if the value is undefined or
        too large.

        For `sin(x)**2 + cos(x)**2 - 1`, the value is 0 and the scale is 2, the total size of the terms.
        """
        try:
            value, scale = self._node(point)
            size = abs(value)
        except (ArithmeticError, ValueError):
            return None
        # The comparison is false for nan. The limit leaves room to subtract two values without overflow.
        return (value, scale) if size < MAX_SIZE else None


def parse_expression(text: str, variables: Sequence[str]) -> Expression:
    """Parse an expression.

    Args:
        text: hostile.
        variables: the allowed names besides functions and constants; they shadow constants.

    Raises:
        ExpressionError: the text is too long, too deeply nested, or outside the grammar.
    """
    parser = _Parser(_tokens(text), frozenset(variables))
    node = parser.expression(0)
    parser.take("")
    return Expression(node)


def _tokens(text: str) -> list[tuple[str, str]]:
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"longer than {MAX_CHARS} characters")
    text = text.strip()
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise ExpressionError(f"unexpected {text[position]!r} at {position}")
        tokens.append((match.lastgroup, match[match.lastgroup]))
        position = match.end()
    return [*tokens, ("sign", "")]


class _Parser:
    """Recursive descent parser over tokens; the last token is an empty sign."""

    def __init__(self, tokens: Sequence[tuple[str, str]], variables: frozenset[str]) -> None:
        self._tokens = tokens
        self._variables = variables
        self._next = 0

    def expression(self, depth: int) -> Node:
        terms = [self._term(depth)]
        while (sign := self._peek()) in ("+", "-"):
            self.take(sign)
            term = self._term(depth)
            terms.append(term if sign == "+" else _negative(term))
        # One flat sum, not a chain of closures: evaluation depth follows nesting, not length.
        return terms[0] if len(terms) == 1 else lambda point: _sum([term(point) for term in terms])

    def take(self, sign: str) -> None:
        if self._tokens[self._next] != ("sign", sign):
            raise ExpressionError(f"expected {sign or 'the end'!r}, found {self._peek()!r}")
        self._next += 1

    def _term(self, depth: int) -> Node:
        factors = [self._factor(depth)]
        while (sign := self._peek()) in ("*", "/"):
            self.take(sign)
            factor = self._factor(depth)
            factors.append(factor if sign == "*" else _inverse(factor))
        return factors[0] if len(factors) == 1 else lambda point: _product([f(point) for f in factors])

    def _factor(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
        if (sign := self._peek()) in ("+", "-"):
            self.take(sign)
            factor = self._factor(depth + 1)
            return factor if sign == "+" else _negative(factor)
        base = self._atom(depth)
        if (sign := self._peek()) not in ("**", "^"):
            return base
        self.take(sign)
        exponent = self._factor(depth + 1)
        return lambda point: _applied(complex.__pow__, [base(point), exponent(point)])

    def _atom(self, depth: int) -> Node:
        kind, text = self._tokens[self._next]
        if kind == "number":
            self._next += 1
            number = _exact(float(text))
            return lambda point: number
        if kind == "name":
            self._next += 1
            return self._named(text, depth)
        self.take("(")
        inner = self.expression(depth + 1)
        self.take(")")
        return inner

    def _named(self, name: str, depth: int) -> Node:
        if name in self._variables:
            return lambda point: _exact(point[name])
        if name in _CONSTANTS:
            constant = _exact(_CONSTANTS[name])
            return lambda point: constant
        if name not in _FUNCTIONS:
            raise ExpressionError(f"unknown name {name!r}")
        function = _FUNCTIONS[name]
        arguments = self._arguments(depth)
        if len(arguments) > (2 if name in _TWO_ARGUMENTS else 1):
            raise ExpressionError(f"too many arguments for {name}")
        return lambda point: _applied(function, [argument(point) for argument in arguments])

    def _arguments(self, depth: int) -> list[Node]:
        self.take("(")
        arguments = [self.expression(depth + 1)]
        while self._peek() == ",":
            self.take(",")
            arguments.append(self.expression(depth + 1))
        self.take(")")
        return arguments

    def _peek(self) -> str:
        kind, text = self._tokens[self._next]
        return text if kind == "sign" else f"{kind} {text}"


def _negative(node: Node) -> Node:
    def negative(point: Point) -> Measured:
        value, scale = node(point)
        return -value, scale

    return negative


def _inverse(node: Node) -> Node:
    return lambda point: _applied(lambda value: 1 / value, [node(point)])


def _exact(value: complex) -> Measured:
    return complex(value), abs(value)


def _sum(terms: Sequence[Measured]) -> Measured:
    return sum((value for value, _ in terms), 0j), sum(scale for _, scale in terms)


def _product(factors: Sequence[Measured]) -> Measured:
    return math.prod(value for value, _ in factors), math.prod(scale for _, scale in factors)


def _applied(function: Callable[..., complex], arguments: Sequence[Measured]) -> Measured:
    """Return the value of a function, and its scale: its change per relative change of the arguments."""
    values = [value for value, _ in arguments]
    result = complex(function(*values))
    scale = abs(result)
    for index, (value, size) in enumerate(arguments):
        moved = [*values[:index], value + _STEP * size, *values[index + 1 :]]
        scale += abs(function(*moved) - result) / _STEP
    return result, scale
