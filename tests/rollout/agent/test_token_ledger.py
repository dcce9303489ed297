"""The token ledger without a model: rows, masks, and the number of positions at which a prompt differs."""

from collections.abc import Sequence

import pytest

from prorl_envs.model.types import Sampled
from prorl_envs.rollout.agent.token_ledger import Ledger


def sampled(*ids: int, exact: bool = True) -> Sampled:
    return Sampled(ids, tuple(-0.1 * i for i in ids), "stop", "3", "server", exact=exact)


def drift_of(*prompts: Sequence[int]) -> int:
    """Return the drift of a ledger of five ids after these prompts."""
    ledger = Ledger([1, 2, 3, 4, 5])
    for prompt in prompts:
        ledger.sent(prompt)
    return ledger.trajectory().drift


@pytest.mark.parametrize(
    ("prompt", "drift"),
    [
        ([1, 2, 3, 4, 5], 0),
        ([1, 9, 3, 4, 5], 1),
        ([9, 2, 9, 4, 9], 3),
        ([1, 2, 3], 2),
        ([1, 2, 3, 4, 5, 6], 1),
        ([], 5),
        ([9, 2, 3], 3),
    ],
)
def test_drift_counts_changed_ids_and_changed_lengths(prompt: Sequence[int], drift: int) -> None:
    assert drift_of(prompt) == drift


def test_drift_of_several_prompts_adds_up() -> None:
    """Ids are compared only after the previous prompt, but the length is that of the complete prompt."""
    assert drift_of([9, 2, 3, 4, 5], [9, 2, 3, 4, 5]) == 1
    assert drift_of([1, 2, 3, 4], [1, 2, 3, 4]) == 2
    ledger = Ledger([1, 2])
    ledger.sent([1, 2])
    ledger.sampled(sampled(3, 4), 0.0)
    ledger.sent([1, 2, 3, 5])
    assert ledger.trajectory().drift == 1


def test_a_fork_starts_without_the_drift_of_the_row_before() -> None:
    ledger = Ledger([1, 2])
    ledger.sent([1, 9])
    ledger.fork([1, 3])
    ledger.sent([1, 3])
    assert [row.drift for row in (*ledger.forks, ledger.trajectory())] == [1, 0]


def test_the_history_tells_every_conversation_apart() -> None:
    ledger = Ledger([1, 2])
    histories = [ledger.history()]
    ledger.sampled(sampled(3), 0.0)
    other = ledger.copy()
    ledger.fork([1, 2, 3])
    histories += [ledger.history(), other.history()]
    other.observed([4])
    histories.append(other.history())
    assert len(set(histories)) == len(histories)
    assert ledger.branch().history() == ledger.history()
    same = Ledger([1, 2])
    same.sampled(sampled(3), 0.0)
    same.observed([4])
    assert same.history() == other.history() == same.history(), "also if it was asked less often"


def test_only_exact_answers_are_trained_on() -> None:
    ledger = Ledger([1])
    ledger.sampled(sampled(2, 3), 0.5)
    ledger.observed([4])
    ledger.sampled(sampled(5, exact=False), 0.25)
    row = ledger.trajectory()
    assert row.ids == ledger.ids == [1, 2, 3, 4, 5] and len(ledger) == 5
    assert row.loss_mask == [0, 1, 1, 0, 0]
    assert row.logprobs == [0.0, -0.2, -0.1 * 3, 0.0, -0.5]
    assert [(turn.start, turn.end) for turn in row.turns] == [(1, 3), (4, 5)]
    assert [turn.token_exact for turn in row.turns] == [True, False] and not row.token_exact
    assert (ledger.turns, ledger.sampled_tokens, ledger.model_s) == (2, 3, 0.75)


def test_tool_time_counts_for_the_turn_that_made_the_calls() -> None:
    ledger = Ledger([1])
    ledger.tools_took(9.0)
    ledger.sampled(sampled(2), 0.0)
    ledger.tools_took(1.0)
    ledger.tools_took(0.5)
    ledger.sampled(sampled(3), 0.0)
    ledger.tools_took(2.0)
    assert [turn.tools_s for turn in ledger.trajectory().turns] == [1.5, 2.0]
    assert ledger.tools_s == 3.5
