"""Comparison of answers: sets of numbers, expressions, words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.env.answers import parse_number
from prorl_envs.env.expressions import ExpressionError
from prorl_envs.envs.ipython.answers import parse_numbers, same_expression, same_numbers, same_text


@given(st.text(max_size=100))
def test_parsing_numbers_never_raises(text: str) -> None:
    assert parse_number(text) is None or parse_numbers(text) is not None or "," in text or "/" in text


def test_lists_of_numbers() -> None:
    assert parse_numbers("[1, 2.5;3\n4]") == [1, 2.5, 3, 4]
    assert parse_numbers("(1, 2, 3,)") == [1, 2, 3], "a separator at the end separates nothing"
    assert parse_numbers("[[1, 2], [3, 4]]") == [1, 2, 3, 4]
    assert parse_numbers("1, 2, and 3") == parse_numbers("1 and 2 and 3") == [1, 2, 3]
    assert parse_numbers("1, two") is None
    assert parse_numbers("2(3)") is None
    assert parse_numbers("1and2") is None
    assert parse_numbers(" ".join(["1"] * 20_000)) is None


def test_sets_of_numbers() -> None:
    assert same_numbers([3, 1, 2], [1, 2, 3], ordered=False, rel_tol=0, abs_tol=0)
    assert not same_numbers([3, 1, 2], [1, 2, 3], ordered=True, rel_tol=0, abs_tol=0)
    assert not same_numbers([1, 1, 2], [1, 2, 2], ordered=False, rel_tol=0, abs_tol=0)
    assert not same_numbers([1, 2], [1, 2, 2], ordered=False, rel_tol=0, abs_tol=0)
    assert same_numbers([1.0005], [1], ordered=True, rel_tol=1e-3, abs_tol=0)
    assert not same_numbers([1.002], [1], ordered=True, rel_tol=1e-3, abs_tol=0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_order_does_not_matter_within_tolerance(values: list[float], random: object) -> None:
    shuffled = sorted(values, key=lambda value: (value * 7919) % 1)
    near = [value + 1e-9 for value in shuffled]
    assert same_numbers(near, values, ordered=False, rel_tol=0, abs_tol=2e-9)


def test_texts() -> None:
    assert same_text(" the  sea\n", "the sea", ignore_case=False)
    assert same_text("STRASSE", "straße", ignore_case=True)
    assert not same_text("The sea", "the sea", ignore_case=False)


@pytest.mark.parametrize(
    ("answer", "same"),
    [
        ("(x + 1)**2", True),
        ("x^2 + 2*x + 1", True),
        ("1 + x*(2 + x)", True),
        ("exp(2*log(x + 1))", True),
        ("(x + 1)**2 + 1e-6", False),
        ("x**2 + 2*x", False),
        ("(x + 1)**2 / 0", False),
        ("9**9**9**9**9", False),
        ("x" * 5000, False),
        ("__import__('os').system('true')", False),
        ("", False),
    ],
)
def test_expressions(answer: str, same: bool) -> None:
    assert same_expression(answer, "x**2 + 2*x + 1", variables=["x"], domain=(0.5, 2)) is same


def test_a_right_answer_is_the_same_for_every_seed() -> None:
    verdicts = {
        same_expression("sin(x)**2", "1 - cos(x)**2", variables=["x"], domain=(0, 9), seed=seed)
        for seed in range(50)
    }
    assert verdicts == {True}


def test_an_expected_expression_must_be_defined() -> None:
    with pytest.raises(ExpressionError, match="undefined"):
        same_expression("1", "1/(x - x)", variables=["x"], domain=(0, 1))


def test_a_deviation_of_the_tolerance_is_accepted() -> None:
    assert same_expression("1 + 0.9e-9", "1", variables=[], domain=(0, 1))
    assert not same_expression("1 + 1.1e-9", "1", variables=[], domain=(0, 1))


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ("10**-20", "10**-30", False),
        ("2**-60", "2**-61", False),
        ("exp(-50)", "exp(-60)", False),
        ("exp(-50)", "exp(-50)", True),
        ("x*1e-20", "x*1e-30", False),
        ("x*1e-20", "1e-20*x", True),
        ("1e-9", "0", False),
        ("1e-20", "0", False),
        ("0", "10**-20", False),
        ("sqrt(2) - sqrt(2)", "10**-20", False),
        ("sin(x)**2 + cos(x)**2 - 1", "0", True),
        ("0", "sin(x)**2 + cos(x)**2 - 1", True),
        ("log(sin(x)**2 + cos(x)**2)", "0", True),
        ("sqrt(sin(x)**2 + cos(x)**2 - 1)", "0", True),
        ("exp(log(x)) - x", "0", True),
        ("sin(pi)", "0", True),
        ("sin(3.14)", "0", False),
        ("0*x", "0", True),
    ],
)
def test_small_expressions_are_compared_relatively(answer: str, expected: str, same: bool) -> None:
    assert same_expression(answer, expected, variables=["x"], domain=(0.5, 2)) is same


def test_the_tolerance_grows_with_the_value() -> None:
    assert same_expression("1e12 + 500", "1e12", variables=[], domain=(0, 1))
    assert not same_expression("1e12 + 2000", "1e12", variables=[], domain=(0, 1))
