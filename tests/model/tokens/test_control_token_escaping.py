"""External text never becomes control tokens, and is restored unchanged."""

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.model.tokens.control_token_escaping import (
    ControlTokenEscaper,
    in_ascii_json,
    new_mark,
    valid_unicode,
)

LITERALS = ("<|im_end|>", "<|im_start|>", "</think>", "<s>", "<<a>>", "aab", "  ", "<")
CONTROL = [text for text in LITERALS if len(text) > 1 and text.strip()]

PIECES = st.sampled_from([*LITERALS, "<|im_", "end|>", "|>", ">", "im_end", "a", "aa", "b", " "])
HOSTILE = st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join)


@cache
def quoter() -> ControlTokenEscaper:
    return ControlTokenEscaper(LITERALS)


@given(HOSTILE, st.booleans())
def test_quoting_only_adds_marks(text: str, leading: bool) -> None:
    mark = new_mark()
    assert quoter().quote(text, mark, leading=leading).replace(mark, "") == text


@given(HOSTILE, HOSTILE)
def test_no_literal_survives_or_arises_between_texts(left: str, right: str) -> None:
    mark = new_mark()
    quoted = quoter().quote(left, mark, leading=True) + quoter().quote(right, mark, leading=True)
    assert not any(literal in quoted for literal in CONTROL)


@given(st.sampled_from(CONTROL), st.data())
def test_the_template_cannot_be_made_to_complete_a_literal(literal: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(literal) - 1))
    end = data.draw(st.integers(start + 1, len(literal)))
    mark = new_mark()
    middle = quoter().quote(literal[start:end], mark, leading=True)
    assert literal not in literal[:start] + middle + literal[end:]


def test_ordinary_text_is_unchanged() -> None:
    text = "def f(x):\n    return x <= 1 and a > b\n"
    assert quoter().quote(text, "MARK", leading=True) == text


def test_every_mark_is_new() -> None:
    assert len({new_mark() for _ in range(100)}) == 100


@pytest.mark.parametrize("form", [str, in_ascii_json])
def test_a_text_that_contains_another_mark_is_restored(form: Callable[[str], str]) -> None:
    text, mark = f"{form(new_mark())}<|im_end|>{form(new_mark())}", new_mark()
    assert quoter().quote(text, mark, leading=True).replace(mark, "") == text


def test_marks_are_not_placed_in_white_space_at_the_ends() -> None:
    quoted = quoter().quote("  <|im_end|>\n", "M", leading=True)
    assert quoted == "  <M|im_end|>\n"


def test_trees_are_quoted_with_their_keys() -> None:
    tree = {"<s>": ["<s>", 1, None, {"k": "x</think>"}]}
    assert quoter().quote_tree(tree, "M") == {"<Ms>": ["<Ms>", 1, None, {"k": "x<M/think>"}]}


def test_either_all_texts_of_a_tree_are_prose_or_none() -> None:
    tree = {"end|>": "end|>", "list": ["end|>", ("end|>",)]}
    assert quoter().quote_tree(tree, "M", leading=True) == {"end|>": "Mend|>", "list": ["Mend|>", ["Mend|>"]]}
    assert quoter().quote_tree(tree, "M") == {**tree, "list": ["end|>", ["end|>"]]}


@given(st.text(st.characters(categories=None)))
def test_valid_unicode_has_utf8(text: str) -> None:
    valid_unicode(text).encode()


@given(st.text())
def test_valid_unicode_keeps_valid_text(text: str) -> None:
    assert valid_unicode(text) == text
