"""Answers extracted from the text of a model."""

import pytest

from prorl_envs.env.words import bare, last_boxed, said, stated


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
        (r"$\boxed 42$", "42"),
        (r"\(\boxed42.\)", "42"),
        (r"\boxed -1,234.5", "-1,234.5"),
        (r"$\boxed\frac{1}{2}$", r"\frac{1}{2}"),
        (r"$\fbox \dfrac12$", r"\dfrac12"),
        ("\\boxed B\nas said", "B"),
        (r"\boxed{1} and $\boxed 2$", "1, 2"),
        (r"$\boxed 42 + x$", ""),
        (r"$\boxed 4 \cdot 2$", ""),
        (r"\boxed 42 is wrong", ""),
        (r"\boxed answer", ""),
        (r"\boxedA", ""),
        (r"\boxed A or B", ""),
        ("\\boxed " + "4" * 100_000, ""),
        ("\\boxed 4" + "," * 100_000, ""),
    ],
)
def test_the_last_box(text: str, found: str) -> None:
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"\(\boxed{1}\), \(\boxed{2}\), and \(\boxed{3}\).", "1, 2, 3"),
        (r"$\boxed{(3, 3)} \quad \text{and} \quad \boxed{(1, 1)}$", "(3, 3), (1, 1)"),
        (r"**\boxed{1}**; **\boxed{2}**", "1, 2"),
        ("\\boxed{1},\n\\boxed{2}", "1, 2"),
        (r"\boxed{42} or \boxed{43}", "42 or 43"),
        (r"\boxed{42}\text{ or }\boxed{43}", "42 or 43"),
        (r"\boxed{1} and \boxed{1}", "1"),
        (r"\boxed{1}, \boxed{1}, \boxed{2}", "1, 2"),
        (r"$\boxed 1$,$\boxed 2$", "1, 2"),
        # several answers of which the last counts
        (r"\boxed{1} so \boxed{2}", "2"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"(a) \boxed{1}, (b) \boxed{2}", "2"),
        (r"\boxed{1}. \boxed{2}", "2"),
        (r"\boxed{1}\,\boxed{2}", "2"),
        (r"\boxed{\boxed{1}, 2}", "1"),
        (r"\boxed{1, \boxed{2}", "2"),
        (r"\boxed{1}, \boxed{2", ""),
        ("\\boxed{1}, " * 10_000, "1"),
        (r"\boxed{1}" + "," * 100_000 + r"\boxed{2}", "2"),
    ],
)
def test_boxes_that_are_joined_are_one_answer(text: str, found: str) -> None:
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Answer: 42", "42"),
        ("**Final answer:** 42", "42"),
        ("The answer is: $x$", "$x$"),
        ("Answer: 1\nAnswer: 2", "2"),
        (r"Answer: 1 \boxed{2}", "2"),
        ("It answers: 3", ""),
        ("answer" + " " * 490 + "\n" * 300, ""),
        ("Answer: " + "4" * 10_000, ""),
        ("Answer:\n" + "4" * 10_000, ""),
        ("Eggs cost money. " * 50 + "The answer is 18.", "18."),
        ("Answer: **_73_**", "73"),
        ("Answer: 3. Wait. Answer: 12", "12"),
        ("Answer: 73\nFinal answer:", "73"),
        ("So: the answer is 73.", "73."),
        ("Answer: the train stops\nThe answer is obvious.", "the train stops"),
        ("Answer: The answer is the red one\nDone", "the red one"),
        ("Answer: 12\n\\boxed{3\nThe answer is obvious.", "12"),
    ],
)
def test_the_stated_answer(text: str, found: str) -> None:
    assert stated(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Answer: **73**", "73"),
        ("Answer: `73`", "73"),
        ("Answer: ***73***.", "73"),
        ("Answer: __73__", "73"),
        ("Answer: _73_", "73"),
        ("Answer: $**73**$", "73"),
        ("Answer: **$73$**", "73"),
        (r"**Answer:** $\frac{3}{4}$", r"\frac{3}{4}"),
        ("**Answer:**73", "73"),
        ("**Answer: 73 **", "73"),
        ("** Answer: 73 **.", "73"),
        ("**Answer: ** 73", "73"),
        ("**Answer: **73**", "73"),
        ("**Answer: B. $14.00 **", "B. $14.00"),
        ("**Answer**: 73", "73"),
        ("> **Answer (in m):** 73", "73"),
        ("Answer: **x^2+1**", "x^2+1"),
        ("**Answer: 9.81 m/s**", "9.81 m/s"),
        ("Answer: **9.81** m/s", "9.81 m/s"),
        ("**Answer: **9.81** m/s**", "9.81 m/s"),
        (r"Answer: $9.81\ \text{m/s}$", r"9.81\ \text{m/s}"),
        (r"Answer: $9.81$ m/s", "9.81 m/s"),
        (r"Answer: \(9.81\) m/s", "9.81 m/s"),
        ("Answer: **B.** two", "B. two"),
        ("The answer is **73**.", "73"),
        ("**The answer is 73.**", "73"),
        ("The answer is `73`", "73"),
        ("So the answer is 73.", "73"),
        ("Therefore, the final answer is $73$.", "73"),
        ("The answer is argon.", "argon"),
        ("The answer is not 73", "not 73"),
        ("**Answer:**\n73", "73"),
        ("**Answer:**\n\n**73**", "73"),
        ("**Answer:\n73**", "73"),
        ("## Final Answer\n\n$73$", "73"),
        ("**Answer:**\n$$\n73\n$$", "73"),
        ("Answer: \\[\n73\n\\]", "73"),
        ("Answer:\n```\n73\n```", "73"),
        ("Answer:\n\n\\boxed{73}", "73"),
        # Marks that are not emphasis, and dollars that enclose several formulas, are part of the answer.
        ("Answer: 2**3", "2**3"),
        ("**Answer: 2**3**", "2**3"),
        ("Answer: `x**2 + y**2`", "x**2 + y**2"),
        ("Answer: 2*3*4", "2*3*4"),
        ("Answer: a_1 + b_1", "a_1 + b_1"),
        ("Answer: **12** or **73**", "12 or 73"),
        ("Answer: $4$ $2$", "$4$ $2$"),
        ("Answer: 4$2$", "4 2"),
        (r"Answer: $\$5$", r"\$5"),
        ("1. **Answer:** 73", "73"),
        ("1) Answer: 73", "73"),
        ("Answer: $$ 73 +\n1 $$", "73 +\n1"),
        ("Answer: ```text\n73\n```", "73"),
        ("Answer $73$", "73"),
        ("Answer:\n- 73", "73"),
        ("Answer:\n1. 73", "73"),
        ("Answer:\n-73", "-73"),
        ("The final answer is therefore 73.", "73"),
        ("Final Answer: The final answer is $73$. I hope it is correct.", "73"),
        ("**Final Answer:** the answer is 73", "73"),
        ("Ans: 73", "73"),
        ("Ans. 73", "73"),
        ("**Final Ans.:** 73", "73"),
        ("ANS = 73", "73"),
        ("So the Ans is 73.", "73"),
        ("ans = 73", ""),
        ("Ans 73", ""),
        ("Trans: 73", ""),
        ("Answer. 73", ""),
        ("Answer => 73", "73"),
        ("Answer → 73", "73"),
        ("Answer -> 73", "73"),
        ("The correct option is B.", "B"),
        ("So the correct choice is **(B)**.", "(B)"),
        ("The first option is B.", ""),
        ("The option is B.", ""),
        ("The answer is 73, since 72 + 1 = 73.", "73"),
        ("The answer is 73, which is prime.", "73"),
        ('It says "seventy-three." The answer is 73.', "73"),
        ("So x = 73 The answer is 73.", "73"),
        ("Based on the rule, the answer is 73.", "73"),
        ("If x > 0, the answer is 73.", ""),
        ("The answer is 73.\n" + "\n" * 60, "73"),
        ("Answer: B because it is even.", "B"),
        ("Answer: because of friction", "because of friction"),
        ("So 72 + 1 = 73.\n#### 73", "73"),
        ("#### -1,234.5 ", "-1,234.5"),
        ("#### $73", "$73"),
        ("So 72 + 1 = 73. #### 73", "73"),
        ("The #### 73 is a heading", ""),
        ("#### 4" + " " * 100_000 + "x", ""),
        ("#### Step 1\nIt is 73.", ""),
        ("#### 1. Sum", ""),
        ("It is <answer>73</answer>.", "73"),
        ("<answer>\n$73$\n</answer>", "73"),
        ("<answer>1</answer> no: <answer>73</answer>", "73"),
        ("<answer>73", ""),
        ("<answer>" + "7" * 600 + "</answer>", ""),
        ("Answer: a\u2028b", "a\u2028b"),
        ("Answer: 7\x0b\x1c3", "7\x0b\x1c3"),
        ("Answer: 73\r\nDone.", "73"),
        ("answer", ""),
        ("The answer\n73", ""),
        ("**The answer** depends on x", ""),
        ("The answer is", ""),
        ("Answer:\n", ""),
    ],
)
def test_decoration_is_not_part_of_the_answer(text: str, found: str) -> None:
    assert bare(stated(text)) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{12}\nAnswer: 3", "3"),
        ("\\boxed{12}\nThe answer is 3.", "3"),
        ("\\boxed{E \\gg kT}\n**Answer: B**", "B"),
        ("\\boxed{A}\nThe correct answer is **B**.", "B"),
        ("\\boxed{12}\n\n**Answer**\n\n3", "3"),
        ("Answer: 3\n\\boxed{12}", "12"),
        ("Answer: 3, \\boxed{12}", "12"),
        ("\\boxed{12}\nAnswer: 3 or 12", "3 or 12"),
        ("\\boxed{12}\nAnswer: the train travels 12 km", "12"),
        ("\\boxed{12}\nAnswer: the train travels 3 km", "the train travels 3 km"),
        ("\\boxed{12}\nThe answer is consistent with the check.", "12"),
        ("Answer: 12\nThe answer is obvious.", "12"),
        ("Answer: 12\nWait, that is wrong. Answer: 3", "3"),
        ("\\boxed{12}\nCorrection: the answer is 3.", "3"),
        ("Answer: 12. The answer is obvious.", "12"),
        ("\\boxed{12}\n#### 3", "3"),
        ("#### 3\n\\boxed{12}", "12"),
        ("<answer>3</answer>\n\\boxed{12}", "12"),
        ("<answer>\\boxed{12}</answer>", "12"),
        ("Answer: 3\n<answer>12</answer>", "12"),
        ("<answer>12</answer>\nAnswer: 3", "3"),
        ("**\\boxed{12}**. Answer: 3", "3"),
        ("<answer>12</answer>. Answer: 3", "3"),
        # in a long text
        ("\n" * 300 + "Answer: 3\n\\boxed{12}", "12"),
        ("\n" * 300 + "\\boxed{12}\nAnswer: 3", "3"),
        ("\n" * 15 + "Answer: 3\n\\boxed{12}", "12"),
        ("\\boxed{12}" + "\n" * 15 + "Answer: 3", "3"),
        ("It is so.\n\\boxed{12}\n\nAnswer: 3", "3"),
        ("x" * 1_000 + "\n\\boxed{12}\nAnswer: 3", "3"),
        # a sentence that emphasises its whole answer
        ("\\boxed{12}\nThe answer is **argon**.", "argon"),
        ("\\boxed{12}\nThe answer is `argon`.", "argon"),
        ("\\boxed{12}\nThe answer is _argon_.", "argon"),
        ("\\boxed{12}\nThe answer is $argon$.", "argon"),
        ("\\boxed{12}\nThe answer is \\(argon\\).", "argon"),
        ("\\boxed{12}\nThe answer is $a$ or argon.", "12"),
        ("\\boxed{12}\nThe answer is argon or $a$.", "12"),
    ],
)
def test_the_later_statement_counts(text: str, found: str) -> None:
    assert bare(stated(text)) == found


@pytest.mark.parametrize(
    "mark",
    [
        "**",
        "*a ",
        "`a",
        "_a ",
        "$a",
        "\\(",
        "a\\",
        "Answer: ",
        "Answer:\n",
        "answer is ",
        "<answer> ",
        "#### 1",
    ],
)
def test_hostile_marks_are_read_quickly(mark: str) -> None:
    text = mark * 3_000
    assert len(stated(text)) <= len(text) and len(bare(text)) <= len(text)


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
        ("**12** or **73**", "12 or 73"),
        ("__name", "__name"),
        ("$x$", "x"),
        ("$$ x $$", "x"),
        (r"\(x\)", "x"),
        (r"\[x\].", "x"),
        ("$x.$", "x"),
        ("12.", "12"),
        ("**Answer:** $x$", "x"),
        ("Final answer: 12.", "12"),
        (r"Answer \[ 9 \]", "9"),
        ("answer x", "answer x"),
        ("Answer:", "Answer:"),
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
