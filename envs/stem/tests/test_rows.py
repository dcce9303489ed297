"""Rows of questions in our format and those of public data sets are read, or refused by field."""

from typing import Any

import pytest

from prorl_envs.envs.stem.env import StemEnvironment
from prorl_envs.envs.stem.grading import is_right
from prorl_envs.envs.stem.task import ChoiceAnswer
from prorl_envs.errors import InputError

CHOICES = ["iron", "gold", "lead", "zinc"]
GOOD: dict[str, Any] = {"id": "a", "instruction": "Which?", "answer": {"type": "number", "value": 1}}


@pytest.mark.parametrize(
    "row",
    [
        {"id": "a", "instruction": "Which?", "choices": CHOICES, "answer": {"type": "choice", "value": "C"}},
        {"question": "Which?", "choices": CHOICES, "answer": 2, "subject": "chemistry"},
        {"question": "Which?", "choices": CHOICES, "answer": "C"},
        {"question_id": 70, "question": "Which?", "options": CHOICES, "answer": "C", "answer_index": 2},
        {
            "id": "x",
            "question": "Which?",
            "choices": {"text": CHOICES, "label": ["A", "B", "C", "D"]},
            "answerKey": "C",
        },
        {"question": "Which?", "choices": {"text": CHOICES, "label": ["1", "2", "3", "4"]}, "answerKey": "3"},
        {
            "Question": "Which?",
            "Correct Answer": "lead",
            "Incorrect Answer 1": "iron",
            "Incorrect Answer 2": "gold",
            "Incorrect Answer 3": "zinc",
        },
    ],
)
def test_known_formats_with_choices(row: dict[str, Any]) -> None:
    task = StemEnvironment.load(row)
    assert isinstance(task.answer, ChoiceAnswer)
    assert dict(task.lettered)[task.answer.value] == "lead"
    assert sorted(task.choices) == sorted(CHOICES)
    assert StemEnvironment.load(row) == task


def test_known_formats_with_short_answers() -> None:
    assert StemEnvironment.load({"question": "How much?", "answer": "9.81"}).answer.type == "number"
    assert StemEnvironment.load({"question": "How much?", "answer": "gold"}).answer.type == "text"


@pytest.mark.parametrize(
    ("answer", "given", "right"),
    [
        (118, "118", True),
        (118, "118.3", True),
        (118, "119", False),
        ("1,945", "1945", True),
        ("1945", "1946", False),
        (-273, "−273", True),
        (-273, "-274", False),
        (300_000_000, "299792458", True),
        (300_000_000, "310000000", False),
        ("118.0", "119", True),
        (92, "93", False),
    ],
)
def test_counts_are_exact(answer: Any, given: str, right: bool) -> None:
    assert is_right(StemEnvironment.load({"question": "How much?", "answer": answer}), given) is right


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({**GOOD, "answer": {"type": "number", "value": "x"}}, "answer.number.value"),
        ({**GOOD, "answer": {"type": "choice", "value": "A"}}, "row"),
        ({**GOOD, "choices": ["x", "y"]}, "row"),
        ({**GOOD, "answer": {"type": "text", "values": []}}, "answer.text.values"),
        ({**GOOD, "hint": 1}, "hint"),
        ({"question": " "}, "question"),
        ({"question": "Which?"}, "answer"),
        ({"question": "Which?", "choices": CHOICES, "answer": 4}, "answer"),
        ({"question": "Which?", "choices": "iron", "answer": 0}, "choices"),
        ({"question": "Which?", "options": ["iron"], "answer": 0}, "options"),
        ({"Question": "Which?", "Correct Answer": "lead"}, "Incorrect Answer 1"),
    ],
)
def test_a_wrong_row_names_its_field(row: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        StemEnvironment.load(row)
    assert caught.value.message.startswith(field)
