"""Answers of the scripted model, which are known in advance."""

from collections import Counter
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.errors import InputError
from prorl_envs.model.types import Sampled
from prorl_envs.testing.scripted import (
    Behaviour,
    Dealer,
    Mix,
    PromptReader,
    Script,
    ScriptBook,
    ScriptedCounts,
    ScriptedModel,
)
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.tools.types import JsonObject
from tests.support.audit import Audit, AuditCounts, Exchange

RENDERER = builtin_renderer()


def call(tool: str, **arguments: object) -> JsonObject:
    return {"tool": tool, "arguments": arguments}


BOOK = ScriptBook.from_tapes(
    {
        "Add two numbers.": [[call("bash", command="echo 4 > sum")], [call("bash", command="cat sum")]],
        "Add": [[call("other", x=1)]],
    }
)


def played(behaviour: Behaviour, turns: int, *, key: str | None = "Add two numbers.") -> list[list[str]]:
    """Return the names of the called tools by turn, parsed like in a client."""
    model = ScriptedModel(RENDERER, BOOK)
    samples = [model.sample(key, behaviour, turn, session="s", max_tokens=10_000) for turn in range(turns)]
    return [[call.name for call in RENDERER.parse(sample.ids).tool_calls] for sample in samples]


def test_the_reference_is_played_and_finished() -> None:
    assert played(Behaviour.SOLVE, 4) == [["bash"], ["bash"], ["finish"], ["finish"]]


def test_the_wrong_behaviour_does_something_harmless_and_finishes() -> None:
    assert played(Behaviour.WRONG, 2) == [["bash"], ["finish"]]
    assert BOOK.turn("Add two numbers.", Behaviour.WRONG, 0) == (
        {"tool": "bash", "arguments": {"command": "ls"}},
    )
    assert played(Behaviour.WRONG, 1, key="Add") == [["finish"]], "no tool known to be harmless"
    book = ScriptBook({"k": Script([], wrong=[[call("edit", path="x")]])})
    assert book.turn("k", Behaviour.WRONG, 0) == [call("edit", path="x")]


def test_idle_loop_and_unknown_tasks() -> None:
    assert played(Behaviour.IDLE, 1) == [["finish"]]
    assert played(Behaviour.LOOP, 5) == [["bash"]] * 5
    assert played(Behaviour.LOOP, 2, key="Add") == [["other"]] * 2
    assert played(Behaviour.SOLVE, 1, key=None) == [["finish"]]


def test_malformed_calls_cannot_be_parsed() -> None:
    sample = ScriptedModel(RENDERER, BOOK).sample("Add", Behaviour.MALFORMED, 0, session="s", max_tokens=999)
    turn = RENDERER.parse(sample.ids)
    assert turn.tool_calls == ()
    assert len(turn.malformed) == 1


def test_garbage_is_not_parsed_as_a_call() -> None:
    assert played(Behaviour.GARBAGE, 3) == [[], [], []]


def test_a_tape_with_a_finish_call_is_not_finished_twice() -> None:
    book = ScriptBook.from_tapes({"k": [[call("finish", answer=7)]]})
    assert book.turn("k", Behaviour.SOLVE, 0) == [call("finish", answer=7)]


def test_samples_are_reproducible_and_plausible() -> None:
    first, second = (
        ScriptedModel(RENDERER, BOOK, seed=3, noncanonical=0.5).sample(
            "Add", Behaviour.SOLVE, 0, session="s", max_tokens=999
        )
        for _ in range(2)
    )
    assert first == second
    assert len(first.ids) == len(first.logprobs)
    assert all(-5 <= value <= 0 for value in first.logprobs)


def test_truncation_is_a_length_finish() -> None:
    model = ScriptedModel(RENDERER, BOOK)
    whole = model.sample("Add", Behaviour.SOLVE, 0, session="s", max_tokens=999)
    assert whole.finish_reason == "stop"
    exact = model.sample("Add", Behaviour.SOLVE, 0, session="s", max_tokens=len(whole.ids))
    assert exact == whole
    short = model.sample("Add", Behaviour.SOLVE, 0, session="s", max_tokens=len(whole.ids) - 1)
    assert (short.finish_reason, short.ids) == ("length", whole.ids[:-1])


def test_the_longest_key_is_found() -> None:
    assert BOOK.find("Please: Add two numbers. Thanks.") == "Add two numbers."
    assert BOOK.find("Add") == "Add"
    assert BOOK.find("Subtract") is None


@pytest.mark.parametrize(
    "bad", [{"tool": 7, "arguments": {}}, {"tool": "x"}, {"tool": "x", "arguments": "y"}]
)
def test_bad_tapes_are_refused(bad: JsonObject) -> None:
    with pytest.raises(InputError, match="tool, arguments"):
        ScriptBook.from_tapes({"k": [[bad]]})


CONTROL = st.sampled_from(["<|im_start|>", "<|im_end|>", "assistant\n", "user\n", "\n"])


@given(st.lists(CONTROL | st.text(max_size=5), max_size=8).map("".join), st.integers(0, 4))
def test_prompts_are_parsed_by_control_tokens_not_by_text(hostile: str, turns: int) -> None:
    ids = RENDERER.prompt([{"role": "system", "content": hostile}, {"role": "user", "content": hostile}])
    for _ in range(turns):
        answer = Sampled(tuple(RENDERER.tokenizer.encode("x").ids), (), "length", "", "")
        ids = [*ids, *answer.ids, *RENDERER.bridge(answer, [{"role": "tool", "content": hostile}])]
    prompt = PromptReader(RENDERER).read(ids)
    assert prompt.first_user == hostile
    assert prompt.assistant_turns == turns


@given(st.lists(st.integers(0, 1100), max_size=40))
def test_any_prompt_is_parsed(ids: list[int]) -> None:
    assert PromptReader(RENDERER).read(ids).assistant_turns >= 0


def test_a_group_gets_exact_proportions() -> None:
    mix = Mix.parse("solve=2, wrong,malformed=1")
    dealer = Dealer(mix, counts := ScriptedCounts(), seed=7)
    for group in range(5):
        dealt = Counter(dealer.deal(f"{group}/{sample}", "task") for sample in range(4))
        assert dealt == {Behaviour.SOLVE: 2, Behaviour.WRONG: 1, Behaviour.MALFORMED: 1}
    assert counts.sessions == 20
    assert counts.behaviours == {"solve": 10, "wrong": 5, "malformed": 5}


def test_decks_are_shuffled_by_seed_and_task_and_kept_per_session() -> None:
    mix = Mix.parse("solve=8,wrong=8")

    def order(seed: int, key: str) -> list[StrEnum]:
        dealer = Dealer(mix, ScriptedCounts(), seed=seed)
        first = [dealer.deal(str(number), key) for number in range(16)]
        assert first == [dealer.deal(str(number), key) for number in range(16)]
        return first

    assert order(1, "a") == order(1, "a")
    assert order(1, "a") != order(2, "a")
    assert order(1, "a") != order(1, "b")


def test_remembered_sessions_are_bounded() -> None:
    dealer = Dealer(Mix.parse("solve"), counts := ScriptedCounts(), max_sessions=2)
    for session in ("a", "b", "c", "a"):
        dealer.deal(session, "k")
    assert counts.sessions == 4, "the first was forgotten"


@pytest.mark.parametrize("text", ["", "solve=0", "solve=-1", "win=1", "solve=x", "solve=99999"])
def test_bad_mixes_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        Mix.parse(text)


def exchange(session: str, prompt: tuple[int, ...], sampled: tuple[int, ...]) -> Exchange:
    return Exchange(session, "solve", 0, prompt, sampled, "stop")


def test_the_audit_distinguishes_growth_repeats_restarts_and_violations() -> None:
    audit = Audit(counts := AuditCounts(), max_exchanges=2)
    audit.check("s", (1, 2), 0)
    audit.record(exchange("s", (1, 2), (3,)))
    audit.check("s", (1, 2, 3, 4), 1)
    assert (counts.violations, counts.restarts, counts.repeats) == (0, 0, 0)
    audit.check("s", (1, 2), 0)
    assert counts.repeats == 1
    audit.check("s", (9,), 0)
    assert counts.restarts == 1
    for drifted in ((1, 2, 9, 4), (1, 2, 4), (1, 2, 2, 1, 4), (0, 1, 2, 3, 4)):
        audit.check("s", drifted, 1)
    assert counts.violations == 4
    for _ in range(3):
        audit.record(exchange("t", (1,), (2,)))
    assert len(audit.exchanges) == 2


def test_audited_sessions_are_bounded() -> None:
    audit = Audit(counts := AuditCounts(), max_sessions=1)
    audit.record(exchange("a", (1,), (2,)))
    audit.record(exchange("b", (1,), (2,)))
    audit.check("a", (5, 5, 5), 1)
    audit.check("b", (5, 5, 5), 1)
    assert counts.violations == 1
