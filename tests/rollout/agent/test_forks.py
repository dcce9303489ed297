"""Episodes of several rows: a template may rewrite the history, but sampled tokens stay unchanged."""

import pytest

from prorl_envs.model.types import Sampling
from prorl_envs.rollout.agent.agent_loop import Agent, Transcript
from prorl_envs.rollout.agent.token_ledger import Ledger
from prorl_envs.rollout.api.types import AgentLimits
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.clock import FakeClock
from tests.support.toy import ToyModel, ToyTask, ToyWorld, empty_node

pytestmark = pytest.mark.anyio

#: A call in another spelling than the template's, which the template would rewrite.
ODD = '<tool_call>{"name":"say", "arguments":{"text":"one"}}</tool_call>'


async def play(reasoning: str) -> tuple[Ledger, list[tuple[int, ...]]]:
    """Return the ledger of three turns, the first of which has another tokenisation, and the prompts."""
    renderer = builtin_renderer()
    model = ToyModel(
        renderer,
        lambda _, turn: (
            ODD if turn == 0 else [{"tool": "say" if turn == 1 else "finish", "arguments": {"text": "x"}}]
        ),
    )
    environment = ToyWorld().family()(empty_node())
    prompt = await environment.init(ToyTask(id="t", instruction="Say it."))
    agent, transcript = Agent(renderer, model, FakeClock(), reasoning), Transcript()  # type: ignore[arg-type]
    limits, sampling = AgentLimits(), Sampling(max_tokens=400)
    try:
        loop = await agent.begin(
            environment, prompt, transcript, limits=limits, sampling=sampling, session="s"
        )
        await loop.finish()
    finally:
        await environment.close()
    assert isinstance(transcript.ledger, Ledger)
    return transcript.ledger, model.prompts["s"]


async def test_an_unchanged_history_is_one_row() -> None:
    ledger, prompts = await play("keep")
    assert ledger.forks == []
    assert len(ledger.trajectory().turns) == len(prompts) == 3


async def test_a_rewritten_history_starts_another_row() -> None:
    ledger, prompts = await play("template")
    (first,) = ledger.forks
    last = ledger.trajectory()
    assert (len(first.turns), len(last.turns)) == (1, 2), "the second turn is spelt as the template spells"
    decode = builtin_renderer().decode
    assert ODD in decode(first.ids) and ODD not in decode(last.ids)
    for row in (first, last):
        sampled = [i for turn in row.turns for i in range(turn.start, turn.end)]
        assert [i for i, mask in enumerate(row.loss_mask) if mask] == sampled
        assert len(row.ids) == len(row.loss_mask) == len(row.logprobs)
        assert row.drift == 0
    sent = [(row, turn) for row in (first, last) for turn in row.turns]
    for prompt, (row, turn) in zip(prompts, sent, strict=True):
        assert list(prompt) == row.ids[: turn.start]
    assert ledger.turns == 3 and ledger.sampled_tokens == sum(turn.end - turn.start for _, turn in sent)


async def test_tool_results_are_not_a_users_turn() -> None:
    ledger, _ = await play("user_turn")
    assert ledger.forks == []
