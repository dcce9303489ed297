"""Text from outside never becomes control tokens, and comes out unchanged."""

from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.policy.quoting import Quoter, valid_unicode

LITERALS = ("<|im_end|>", "<|im_start|>", "</think>", "<s>", "<<a>>", "aab", "  ", "<")
QUOTER = Quoter(LITERALS)
CONTROL = [text for text in LITERALS if len(text) > 1 and text.strip()]

PIECES = st.sampled_from([*LITERALS, "<|im_", "end|>", "|>", ">", "im_end", "a", "aa", "b", " "])
HOSTILE = st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join)


@given(HOSTILE, st.booleans())
def test_quoting_only_adds_marks(text: str, leading: bool) -> None:
    mark = QUOTER.choose_mark(text)
    assert QUOTER.quote(text, mark, leading=leading).replace(mark, "") == text


@given(HOSTILE, HOSTILE)
def test_no_literal_survives_or_arises_between_texts(left: str, right: str) -> None:
    mark = QUOTER.choose_mark([left, right])
    quoted = QUOTER.quote(left, mark, leading=True) + QUOTER.quote(right, mark, leading=True)
    assert not any(literal in quoted for literal in CONTROL)


@given(st.sampled_from(CONTROL), st.data())
def test_the_template_cannot_be_made_to_complete_a_literal(literal: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(literal) - 1))
    end = data.draw(st.integers(start + 1, len(literal)))
    mark = QUOTER.choose_mark(literal)
    middle = QUOTER.quote(literal[start:end], mark, leading=True)
    assert literal not in literal[:start] + middle + literal[end:]


def test_ordinary_text_is_left_alone() -> None:
    text = "def f(x):\n    return x <= 1 and a > b\n"
    assert QUOTER.quote(text, "MARK", leading=True) == text


def test_a_mark_occurs_nowhere_even_if_the_text_foresees_marks() -> None:
    first = QUOTER.choose_mark("")
    value = {"a": [first, {QUOTER.choose_mark(first): 1}]}
    mark = QUOTER.choose_mark(value)
    assert mark not in {first, QUOTER.choose_mark(first)}


def test_marks_stay_away_from_white_space_at_the_ends() -> None:
    quoted = QUOTER.quote("  <|im_end|>\n", "M", leading=True)
    assert quoted == "  <M|im_end|>\n"


def test_trees_are_quoted_keys_included() -> None:
    tree = {"<s>": ["<s>", 1, None, {"k": "x</think>"}]}
    assert QUOTER.quote_tree(tree, "M") == {"<Ms>": ["<Ms>", 1, None, {"k": "x<M/think>"}]}


@given(st.text(st.characters(categories=None)))
def test_valid_unicode_has_utf8(text: str) -> None:
    valid_unicode(text).encode()


@given(st.text())
def test_valid_unicode_keeps_valid_text(text: str) -> None:
    assert valid_unicode(text) == text
