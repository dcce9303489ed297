"""Parsing of expressions: sympy's output is understood, and hostile input is refused quickly."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.env.expressions import MAX_CHARS, MAX_DEPTH, ExpressionError, parse_expression


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("2**3**2", 512),
        ("2^3", 8),
        ("-x**2", -4),
        ("2**-1", 0.5),
        ("1 - 2 - 3", -4),
        ("8 / 4 / 2", 1),
        ("x*(x + 1)/2", 3),
        (".5e1 + 1.", 6),
        ("exp(log(x))", 2),
        ("log(8, 2)", 3),
        ("sqrt(2)*cos(pi/4)", 1),
        ("factorial(5)", 120),
        ("Abs(-x)", 2),
        ("E", math.e),
        ("sec(x)*cos(x) + csc(x)*sin(x) + cot(x)*tan(x)", 3),
        ("sech(x)*cosh(x) + csch(x)*sinh(x) + coth(x)*tanh(x)", 3),
        ("asec(x) - acos(1/2) + acsc(x) - asin(1/2) + acot(x) - atan(1/2)", 0),
        ("arcsin(1/x) - asin(1/2) + arctan(x) - atan(x) + arccosh(x) - acosh(x)", 0),
        ("log2(8) + log10(100) + cbrt(8)", 7),
    ],
)
def test_values(text: str, value: float) -> None:
    result = parse_expression(text, ["x"])({"x": 2.0})
    assert result is not None
    assert abs(result - value) < 1e-12


def test_a_variable_shadows_a_constant() -> None:
    assert parse_expression("E", ["E"])({"E": 5.0}) == 5


@pytest.mark.parametrize(
    "text", ["1/0", "1/(x - 2)", "9**9**9**9", "exp(exp(exp(9)))", "log(0)", "(-1)**0.5/0"]
)
def test_expressions_without_a_value_are_none(text: str) -> None:
    assert parse_expression(text, ["x"])({"x": 2.0}) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 +",
        "x y",
        "2x",
        "__import__('os')",
        "x.real",
        "f(x)",
        "sin",
        "sin()",
        "sin(1, 2)",
        "x = 1",
        "[1]",
        "1; 2",
        "lambda: 1",
        "(" * 500 + "1" + ")" * 500,
        "-" * 500 + "1",
        "2**" * 300 + "1",
        "1+" * MAX_CHARS + "1",
    ],
)
def test_expressions_outside_the_grammar_are_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_expression(text, ["x"])


@given(st.text(alphabet="x19.+-*/^(), eEIsinlogqrtpabf", max_size=200))
def test_parsing_never_raises_other_errors(text: str) -> None:
    try:
        value = parse_expression(text, ["x"])({"x": 1.5})
    except ExpressionError:
        return
    assert value is None or abs(value) < math.inf


@given(
    st.recursive(
        st.sampled_from(["x", "2", "pi"]),
        lambda inner: st.tuples(inner, inner).map(lambda pair: f"({pair[0]} + sin({pair[1]}))"),
        max_leaves=20,
    )
)
def test_generated_expressions_are_parsed(text: str) -> None:
    scope = {"sin": math.sin, "pi": math.pi, "x": 0.7}
    result = parse_expression(text, ["x"])({"x": 0.7})
    assert result is not None
    assert abs(result - eval(text, scope)) < 1e-9


@pytest.mark.parametrize(
    "nested",
    [
        lambda depth: "(" * depth + "1" + ")" * depth,
        lambda depth: "sin(" * depth + "1" + ")" * depth,
        lambda depth: "-" * depth + "1",
        lambda depth: "1" + "**1" * depth,
    ],
    ids=["parentheses", "calls", "signs", "powers"],
)
def test_nesting_is_parsed_up_to_the_limit(nested: Callable[[int], str]) -> None:
    assert parse_expression(nested(MAX_DEPTH), [])({}) is not None
    with pytest.raises(ExpressionError, match="nested deeper"):
        parse_expression(nested(MAX_DEPTH + 1), [])


def test_the_longest_expression_is_parsed() -> None:
    longest = "1" + " " * (MAX_CHARS - 3) + "+1"
    assert parse_expression(longest, [])({}) == 2
    with pytest.raises(ExpressionError, match="longer"):
        parse_expression(longest + " ", [])


def test_a_factorial_of_a_complex_number_has_no_value() -> None:
    assert parse_expression("factorial(2 + I)", [])({}) is None
    assert parse_expression("factorial(2 + 0*I)", [])({}) == 2


def test_only_a_logarithm_takes_two_arguments() -> None:
    assert parse_expression("log(8, 2)", [])({}) == pytest.approx(3)
    for text in ("log(8, 2, 2)", "sin(1, 2)"):
        with pytest.raises(ExpressionError, match="too many arguments"):
            parse_expression(text, [])


@pytest.mark.parametrize(
    ("text", "said"), [("(1", "expected ')', found ''"), ("2 3", "expected 'the end', found 'number 3'")]
)
def test_an_error_names_the_expected_and_the_found_token(text: str, said: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse_expression(text, [])
    assert str(caught.value) == said
