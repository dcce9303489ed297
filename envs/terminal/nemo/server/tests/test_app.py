# SPDX-FileCopyrightText: 2026 the authors of prorl-envs
# SPDX-License-Identifier: Apache-2.0
"""Run by `gym env test --resources-server prorl_terminal`: recorded answers get the recorded rewards."""

from pathlib import Path

from prorl_envs.nemo.fixture import case_outcomes, rollout_outcomes, unexpected

FOLDER = Path(__file__).parents[1]


def test_each_case_of_the_verifier_is_scored_as_expected() -> None:
    outcomes = case_outcomes("terminal", FOLDER)
    assert len(outcomes) == 4 and not unexpected(outcomes)


def test_the_example_rollouts_are_scored_the_same_again() -> None:
    outcomes = rollout_outcomes("terminal", FOLDER)
    assert len(outcomes) == 5 and not unexpected(outcomes)
