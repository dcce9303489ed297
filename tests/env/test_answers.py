"""Judging answers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.env.answers import (
    MAX_NUMBER_CHARS,
    is_close,
    parse_number,
    parse_numbers,
    same_expression,
    same_numbers,
    same_text,
)
from prorl_envs.env.expressions import ExpressionError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 42 ", 42),
        ("-1.5e3", -1500),
        ("1,234,567.5", 1234567.5),
        ("3/4", 0.75),
        ("-1 / 8", -0.125),
        (".5", 0.5),
        ("2 1/4", 2.25),
        ("-2  1 / 4", -2.25),
        ("+0 1/2", 0.5),
        ("−2.5e−3", -0.0025),
    ],
)
def test_numbers_in_common_notations(text: str, value: float) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "nan",
        "inf",
        "1e9999",
        "1/0",
        "0x10",
        "1_000",
        "12,34",
        "42 m",
        "2 − 1",
        "–2",
        "4 10/3",
        "4 3/3",
        "2 1/0",
        "2 -1/4",
        "2.5 1/4",
        "2 1.5/4",
        "4 2",
        "__import__('os')",
        "9" * 100,
        "1e99999",
        "٤٢",
    ],
)
def test_texts_that_are_not_numbers(text: str) -> None:
    assert parse_number(text) is None


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


def test_the_longest_number_is_parsed() -> None:
    assert parse_number("9" * MAX_NUMBER_CHARS) == 10**MAX_NUMBER_CHARS - 1
    assert parse_number("9" * (MAX_NUMBER_CHARS + 1)) is None


@pytest.mark.parametrize(
    ("value", "expected", "abs_tol", "close"),
    [
        (0.4, 0.3, 0.1, True),
        (2.4, 2.3, 0.1, True),
        (2.41, 2.3, 0.1, False),
        (2**60, 2**60 + 1, 0.5, False),
        (1.0, 10**400, 0.5, False),
        (math.inf, 1.0, 0.5, False),
        (1.0, math.nan, 0.5, False),
    ],
)
def test_decimals_and_integers_are_compared_exactly(
    value: float, expected: float, abs_tol: float, close: bool
) -> None:
    assert is_close(value, expected, rel_tol=0, abs_tol=abs_tol) is close
