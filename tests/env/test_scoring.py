"""Computation of a reward from checks."""

import pytest

from prorl_envs.env.scoring import CheckModel, CheckResult, Scoring, check_names, score

HALF = [
    CheckResult(name="a", passed=True, weight=1.0, detail={"saw": 1}),
    CheckResult(name="b", passed=False, weight=3.0),
]


def test_all_or_nothing() -> None:
    assert score(HALF, Scoring.ALL).reward == 0.0
    assert score(HALF[:1], Scoring.ALL).reward == 1.0


def test_weighted() -> None:
    grade = score(HALF, Scoring.WEIGHTED)
    assert grade.reward == 0.25
    assert grade.components == {"a": 1.0, "b": 0.0}
    assert grade.evidence["checks"][0] == {"name": "a", "passed": True, "weight": 1.0, "saw": 1}


def test_a_partly_passed_check_counts_for_its_share() -> None:
    parts = [
        CheckResult(name="a", passed=False, share=0.25, weight=3.0),
        CheckResult(name="b", passed=True),
    ]
    grade = score(parts, Scoring.WEIGHTED)
    assert grade.reward == (3 * 0.25 + 1) / 4
    assert grade.components == {"a": 0.25, "b": 1.0}
    assert score(parts, Scoring.ALL).reward == 0.0


def test_names_are_unique() -> None:
    assert check_names([CheckModel(), CheckModel(name="n")], ["x", "y"]) == ["1-x", "n"]
    with pytest.raises(ValueError, match="same name"):
        check_names([CheckModel(name="2-x"), CheckModel()], ["x", "x"])
