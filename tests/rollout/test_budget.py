"""Going round in circles, and cutting what is observed."""

from typing import Any

import pytest

from prorl_envs.env.base import Message
from prorl_envs.rollout.budget import Repeats, cut, shorter, sizes
from prorl_envs.tools.types import ToolCall


def turn(name: str) -> tuple[list[ToolCall], list[Message]]:
    """A turn: upper case for another outcome of the same call; `-` calls nothing."""
    if name == "-":
        return [], []
    return [ToolCall(f"id-{name}", "bash", {"command": name.lower()})], [{"role": "tool", "content": name}]


@pytest.mark.parametrize(
    ("limit", "turns", "noticed"),
    [
        (0, "aaaaaaaa", 0),
        (1, "a", 1),
        (3, "aa", 0),
        (3, "aaa", 3),
        (3, "baaa", 4),
        (3, "aaAaA", 0),  # the outcome differs
        (3, "aa-aa", 0),
        (3, "aa-aaa", 6),
        (3, "ababa", 0),
        (3, "ababab", 6),
        (3, "xyababab", 8),
        (3, "abcabcabcabc", 0),
        (2, "abab", 4),
    ],
)
def test_circles_are_noticed_at_once_and_nothing_else_is(limit: int, turns: str, noticed: int) -> None:
    repeats = Repeats(limit)
    seen = [number for number, name in enumerate(turns, start=1) if repeats.noticed(*turn(name))]
    assert (seen[0] if seen else 0) == noticed


def test_arguments_count_and_ids_do_not() -> None:
    repeats = Repeats(2)
    given: list[dict[str, Any]] = [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1}]
    assert [repeats.noticed([ToolCall(str(n), "t", one)], []) for n, one in enumerate(given)] == [
        False,
        True,
        False,
    ]


def test_a_cut_keeps_both_ends_and_says_so() -> None:
    assert cut("short", 5) == "short"
    text = cut("a" * 500 + "b" * 500, 201)
    assert text == "a" * 101 + "\n[799 characters left out]\n" + "b" * 100


def test_sizes_end_at_the_least_and_cut_everything_that_is_longer() -> None:
    observations = [{"role": "tool", "content": "x" * 1000}, {"role": "tool", "content": "y"}]
    assert sizes(observations) == [500, 250, 200]
    assert sizes([]) == sizes([{"content": "x" * 200}]) == []
    cut_ones = shorter(observations, 200)
    assert len(cut_ones[0]["content"]) < 250 and cut_ones[1] == observations[1]
