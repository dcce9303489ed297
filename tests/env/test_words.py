"""Answers extracted from the text of a model."""

import pytest

from prorl_envs.env.words import bare, last_boxed, last_code, said, stated


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nno:\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```text\nb\n```", "a\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("```python\na", ""),
        ("<think>\n```python\na\n```", ""),
        ("<think>\n```python\na\n```\n</think>\n```python\nb\n```", "b\n"),
        ("", ""),
        ("```x\n" * 50_000, ""),
    ],
)
def test_the_last_block_of_python(text: str, code: str) -> None:
    assert last_code(text) == code


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{\frac{1}{2}} and", r"\frac{1}{2}"),
        (r"\boxed{1} \boxed {2}", "2"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{1", ""),
        ("\\boxed{" * 20_000, ""),
        (r"<think>\boxed{1}", ""),
    ],
)
def test_the_last_box(text: str, found: str) -> None:
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Answer: 42", "42"),
        ("**Final answer:** 42", "** 42"),
        ("The answer is: $x$", "$x$"),
        ("Answer: 1\nAnswer: 2", "2"),
        (r"Answer: 1 \boxed{2}", "2"),
        ("It answers: 3", ""),
        ("answer" + " " * 490 + "\n" * 300, ""),
        ("Answer: " + "4" * 10_000, ""),
    ],
)
def test_the_stated_answer(text: str, found: str) -> None:
    assert stated(text) == found


def test_reasoning_is_not_part_of_the_answer() -> None:
    assert said("<think>a</think>b") == "b"
    assert said("<think>a") == ""
    assert said("a") == "a"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\}b} c}", r"a\}b"),
        (r"\boxed{a\\} b}", r"a\\"),
        (r"\boxed{1", ""),
        (r"\boxed{1\}", ""),
    ],
)
def test_escaped_braces_are_not_delimiters(text: str, found: str) -> None:
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        (r"It is \boxed{42}.", "42"),
        ("$x$", "x"),
        ("$$ x $$", "x"),
        (r"\(x\)", "x"),
        (r"\[x\].", "x"),
        ("$x.$", "x"),
        ("12.", "12"),
        ("12 .", "12"),
        ("and so on...", "and so on..."),
        ("1.5", "1.5"),
        ("$5", "$5"),
        ("5$", "5$"),
        ("$$", "$$"),
        (r"\(\)", r"\(\)"),
        (r"\(x", r"\(x"),
    ],
)
def test_an_answer_is_stripped_of_its_delimiters(answer: str, left: str) -> None:
    assert bare(answer) == left
