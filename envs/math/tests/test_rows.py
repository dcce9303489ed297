"""Rows of mathematics in our format and those of public data sets are read, or refused by field."""

from typing import Any

import pytest

from prorl_envs.envs.math.env import MathEnvironment
from prorl_envs.errors import InputError


@pytest.mark.parametrize(
    ("row", "name", "answer"),
    [
        ({"id": "a", "instruction": "What is 6 * 7?", "answer": "42"}, "a", "42"),
        ({"question": "How many?", "answer": "They are 6 * 7 = <<6*7=42>>42.\n#### 42"}, None, "42"),
        ({"question": "How many?", "answer": "#### 1,234"}, None, "1,234"),
        (
            {"problem": "Find x.", "solution": r"So $x = \boxed{\frac{1}{2}}$.", "level": "5"},
            None,
            r"\frac{1}{2}",
        ),
        ({"problem": "Find x.", "answer": "7", "unique_id": "test/1.json"}, "test/1.json", "7"),
        ({"Problem": "Find x.", "Answer": 204, "ID": "2024-I-1"}, "2024-I-1", "204"),
        ({"problem": "Find x.", "expected_answer": r"\boxed{3}"}, None, "3"),
        (
            {
                "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Find x."}],
                "reward_model": {"ground_truth": "34", "style": "rule"},
                "extra_info": {"index": "9a9b"},
            },
            "9a9b",
            "34",
        ),
        (
            {
                "data_source": "deepscaler",
                "prompt": '[{"role": "user", "content": "Find x."}]',
                "reward_model": '{"ground_truth": "34", "style": "rule"}',
            },
            None,
            "34",
        ),
        ({"prompt": "[1, 2] is an interval. Find x.", "answer": "7"}, None, "7"),
    ],
)
def test_known_formats_are_read(row: dict[str, Any], name: str | None, answer: str) -> None:
    task = MathEnvironment.load(row)
    assert task.answer == answer
    assert task.instruction.endswith((".", "?"))
    assert name is None or task.id == name
    assert MathEnvironment.load(row).id == task.id


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"id": "a", "instruction": "What?"}, "answer"),
        ({"id": "a", "instruction": "What?", "answer": ""}, "answer"),
        ({"id": "a", "instruction": "What?", "answer": "1", "reward": 1}, "reward"),
        ({"question": ""}, "question"),
        ({"question": "What?"}, "answer"),
        ({"question": "What?", "answer": ["a", "b"]}, "answer"),
        ({"question": "What?", "answer": True}, "answer"),
        ({"question": "What?", "answer": "####"}, "answer"),
        ({"prompt": [{"role": "system", "content": "x"}], "answer": "1"}, "prompt"),
        ({"prompt": "What?", "reward_model": {"style": "rule"}}, "reward_model.ground_truth"),
        ({"prompt": "[{}]", "reward_model": "{"}, "answer"),
        ({}, "id"),
    ],
)
def test_a_wrong_row_names_its_field(row: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        MathEnvironment.load(row)
    assert caught.value.message.startswith(field)
