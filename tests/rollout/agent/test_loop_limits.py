"""Detection of loops, and cutting of observations."""

from typing import Any

import pytest

from prorl_envs.env.base import Message
from prorl_envs.rollout.agent.loop_limits import RepeatDetector, cut, cut_all, cut_sizes
from prorl_envs.tools.types import ToolCall


def turn(name: str) -> tuple[list[ToolCall], list[Message]]:
    """Return turns, one per character: upper case for another outcome of the same call; `-` for no call."""
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
def test_only_loops_are_detected_and_at_once(limit: int, turns: str, noticed: int) -> None:
    repeats = RepeatDetector(limit)
    seen = [number for number, name in enumerate(turns, start=1) if repeats.noticed(*turn(name))]
    assert (seen[0] if seen else 0) == noticed


def test_loop_detection_compares_arguments_but_not_ids() -> None:
    repeats = RepeatDetector(2)
    given: list[dict[str, Any]] = [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1}]
    assert [repeats.noticed([ToolCall(str(n), "t", one)], []) for n, one in enumerate(given)] == [
        False,
        True,
        False,
    ]


def test_a_cut_keeps_both_ends_and_is_marked() -> None:
    assert cut("short", 5) == "short"
    text = cut("a" * 500 + "b" * 500, 201)
    assert text == "a" * 101 + "\n[799 characters left out]\n" + "b" * 100


def test_cut_sizes_have_a_minimum_and_include_only_longer_texts() -> None:
    observations = [{"role": "tool", "content": "x" * 1000}, {"role": "tool", "content": "y"}]
    assert cut_sizes(observations) == [500, 250, 200]
    assert cut_sizes([]) == cut_sizes([{"content": "x" * 200}]) == []
    cut_ones = cut_all(observations, 200)
    assert len(cut_ones[0]["content"]) < 250 and cut_ones[1] == observations[1]
