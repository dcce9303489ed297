# SPDX-FileCopyrightText: 2026 the authors of prorl-envs
# SPDX-License-Identifier: Apache-2.0
"""Run by `gym env test --resources-server prorl_code`: recorded answers get the recorded rewards."""

from pathlib import Path

from prorl_envs.nemo.fixture import recorded_outcomes


def test_recorded_answers_get_the_recorded_rewards() -> None:
    outcomes = recorded_outcomes("code", Path(__file__).parents[1])
    assert len(outcomes) == 9
    assert [outcome for outcome in outcomes if not outcome.as_expected] == []
