"""Grades and prompts that other programs could not read are refused."""

import math
from typing import Any

import pytest

from prorl_envs.env.base import Grade, Prompt
from prorl_envs.errors import EnvironmentFault, GraderError
from prorl_envs.tools.types import ToolSpec


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, 10**400, 10**5000, True, "1", None],
    ids=lambda value: type(value).__name__,
)
def test_a_reward_is_a_finite_number(value: Any) -> None:
    with pytest.raises(GraderError, match="for reward, which is not a finite number"):
        Grade(reward=value)
    with pytest.raises(GraderError, match="for part, which is not a finite number"):
        Grade(reward=1, components={"part": value})


@pytest.mark.parametrize(
    ("evidence", "problem"),
    [
        ([1], "not a JSON object"),
        ({"x": math.nan}, "not JSON"),
        ({"x": "\ud800"}, "not JSON"),
        ({"x": {1, 2}}, "not JSON"),
    ],
)
def test_evidence_is_json(evidence: Any, problem: str) -> None:
    with pytest.raises(GraderError, match=problem):
        Grade(reward=0.5, evidence=evidence)


@pytest.mark.parametrize("text", ["\ud800", b"bytes"])
def test_a_prompt_is_json(text: Any) -> None:
    with pytest.raises(EnvironmentFault, match="the prompt is not JSON"):
        Prompt([{"role": "user", "content": text}], ())
    with pytest.raises(EnvironmentFault, match="the prompt is not JSON"):
        Prompt((), [ToolSpec("bash", "Run it.", {"type": "object", "title": text})])


def test_whole_numbers_and_negative_rewards_are_valid() -> None:
    assert Grade(reward=-1, components={"part": 10**300}).reward == -1
