"""Judging answers."""

import math

import pytest

from prorl_envs.env.answers import (
    MAX_NUMBER_CHARS,
    is_close,
    parse_number,
)


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
