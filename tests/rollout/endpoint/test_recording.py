"""Conversations as harnesses write them, and the rows they become. No HTTP: this is about ids."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.env.base import Message
from prorl_envs.policy.rendering import TemplateRenderer
from prorl_envs.policy.types import Sampled
from prorl_envs.rollout.endpoint.reading import tidied
from prorl_envs.rollout.endpoint.recording import Recording
from prorl_envs.rollout.types import Trajectory
from prorl_envs.testing.families import family_renderer
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.tools.types import ToolSpec
from tests.rollout.endpoint.conftest import LS, check_rows

TOOLS = [ToolSpec("ls", "", LS)]


class Talk:
    """A recording, and what the model is made to say."""

    def __init__(self, renderer: TemplateRenderer | None = None, reasoning: Any = "keep") -> None:
        self.renderer = renderer or builtin_renderer()
        self.recording = Recording(self.renderer, reasoning)
        self.prompts: list[list[int]] = []

    def ask(self, messages: Sequence[Message], *, says: Message | list[int]) -> Message:
        """One call; the message that a harness would keep."""
        pending = self.recording.prompt(tidied(messages), TOOLS)
        ids = says if isinstance(says, list) else self.renderer.assistant(says)
        sampled = Sampled(tuple(ids), (-0.5,) * len(ids), "stop", "1", "here")
        self.prompts.append(list(pending.ids))
        turn, _ = self.recording.answered(pending, sampled, asked_at=1.0, now=2.0)
        said: Message = {"role": "assistant", "content": turn.content}
        if turn.tool_calls:
            said["tool_calls"] = [
                {"id": c.id, "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                for c in turn.tool_calls
            ]
        return said

    @property
    def rows(self) -> list[Trajectory]:
        last = self.recording.trajectory()
        rows = [*self.recording.forks, *([last] if last else [])]
        check_rows(rows)
        return rows


def text(content: str) -> Message:
    return {"role": "assistant", "content": content}


def call(command: str) -> Message:
    arguments = json.dumps({"command": command})
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "ls", "arguments": arguments}}],
    }


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def results(said: Message, output: str = "ok") -> list[Message]:
    return [{"role": "tool", "tool_call_id": c["id"], "content": output} for c in said["tool_calls"]]


@pytest.mark.parametrize(
    "family", ["hermes", "coder", "glm", "llama", "deepseek", "kimi", "gemma", "harmony"]
)
def test_a_conversation_that_goes_on_is_one_row(family: str) -> None:
    talk = Talk(family_renderer(family))
    history = [{"role": "system", "content": "You look."}, user("Look.")]
    for turn in range(4):
        said = talk.ask(history, says=call(f"ls {turn}"))
        assert "tool_calls" in said
        history += [said, *results(said)]
    talk.ask(history, says=text("Done."))
    (row,) = talk.rows
    assert len(row.turns) == 5
    for prompt, record in zip(talk.prompts, row.turns, strict=True):
        assert prompt == row.ids[: record.start], "what was sent is what is recorded"


def test_another_tokenisation_is_kept() -> None:
    """What was sampled is not the template's own tokenisation, and goes back to the model as it was."""
    talk = Talk()
    odd = [*talk.renderer.tokenizer.encode("i").ids, *talk.renderer.tokenizer.encode("s").ids]
    assert odd != talk.renderer.tokenizer.encode("is").ids
    said = talk.ask([user("a")], says=[*odd, talk.renderer.stop_ids[0]])
    talk.ask([user("a"), said, user("b")], says=text("c"))
    (row,) = talk.rows
    first = row.turns[0]
    assert row.ids[first.start : first.end - 1] == odd


@pytest.mark.parametrize(
    "changed",
    [
        lambda m: {**m, "content": f"\n{m['content']}  "},
        lambda m: {**m, "content": None if not m["content"] else m["content"], "refusal": None},
        lambda m: {**m, "reasoning_content": "what the harness makes of it"},
        lambda m: {
            **m,
            "tool_calls": [
                {**c, "function": {**c["function"], "arguments": '{"command":"ls  -l"}'}}
                for c in m["tool_calls"]
            ],
        },
    ],
)
def test_ways_of_writing_history_do_not_fork(changed: Any) -> None:
    talk = Talk()
    said = talk.ask([user("a")], says=call("ls  -l"))
    kept = changed(said)
    history = [user("a"), {**kept, "content": kept["content"] or ""}, *results(said)]
    talk.ask(history, says=text("b"))
    assert len(talk.rows) == 1


def test_a_retry_is_a_row_of_its_own_whose_beginning_is_context() -> None:
    talk = Talk()
    said = talk.ask([user("a")], says=call("ls"))
    history = [user("a"), said, *results(said)]
    talk.ask(history, says=text("one"))
    talk.ask(history, says=text("two"))
    first, second = talk.rows
    assert (len(first.turns), len(second.turns)) == (2, 1)
    assert second.parent == 0 and second.shared == first.turns[0].end
    assert sum(second.loss_mask) == second.turns[0].end - second.turns[0].start


def test_sub_agents_and_compaction_branch_and_nothing_is_dropped() -> None:
    talk = Talk()
    system = {"role": "system", "content": "Main."}
    history: list[Message] = [system, user("Do it.")]
    for turn in range(3):
        said = talk.ask(history, says=call(f"main {turn}"))
        history += [said, *results(said)]
        sub: list[Message] = [{"role": "system", "content": "Sub."}, user(f"part {turn}")]
        answer = talk.ask(sub, says=call(f"sub {turn}"))
        talk.ask([*sub, answer, *results(answer)], says=text(f"part {turn} done"))
    compacted = [system, user("Do it. So far: three looks.")]
    said = talk.ask(compacted, says=call("after"))
    talk.ask([*compacted, said, *results(said)], says=text("Done."))
    rows = talk.rows
    assert sorted(len(row.turns) for row in rows) == [2, 2, 2, 2, 3]
    assert sum(len(row.turns) for row in rows) == talk.recording.turns == 11
    assert "Done." in talk.renderer.decode(rows[-1].ids), "that of the last answer is the last"


def test_an_answer_that_was_rewritten_is_context_behind_what_was_recorded() -> None:
    talk = Talk()
    first = talk.ask([user("a")], says=text("one"))
    second = talk.ask([user("a"), first, user("b")], says=text("a secret"))
    assert second["content"] == "a secret"
    history = [user("a"), first, user("b"), text("[redacted]"), user("c")]
    talk.ask(history, says=text("three"))
    main, branch = talk.rows
    assert branch.parent == 0 and branch.shared == main.turns[0].end
    shown = talk.renderer.decode(branch.ids)
    assert "[redacted]" in shown and "a secret" not in shown
    assert len(branch.turns) == 1


def test_other_tools_or_another_system_prompt_begin_anew() -> None:
    talk = Talk()
    said = talk.ask([user("a")], says=text("one"))
    history = [user("a"), said, user("b")]
    pending = talk.recording.prompt(history, [ToolSpec("other", "", LS)])
    assert pending.parent is None
    pending = talk.recording.prompt([{"role": "system", "content": "New."}, *history], TOOLS)
    assert pending.parent is None


def test_parallel_calls_of_one_state_are_two_rows() -> None:
    talk = Talk()
    said = talk.ask([user("a")], says=text("one"))
    history = [user("a"), said]
    one = talk.recording.prompt([*history, user("b")], TOOLS)
    two = talk.recording.prompt([*history, user("c")], TOOLS)
    for pending, answer in ((two, "two"), (one, "one")):
        ids = tuple(talk.renderer.assistant(text(answer)))
        sampled = Sampled(ids, (-1.0,) * len(ids), "stop", "1", "here")
        talk.recording.answered(pending, sampled, asked_at=0.0, now=1.0)
    first, second = talk.rows
    assert (len(first.turns), len(second.turns)) == (2, 1)
    assert first.ids[: first.turns[1].start] == list(two.ids) and second.ids[: second.turns[0].start] == list(
        one.ids
    )


def test_calls_with_the_same_words_have_ids_of_their_own() -> None:
    talk = Talk()
    one = talk.ask([user("a")], says=call("ls"))
    two = talk.ask([user("a"), one, *results(one)], says=call("ls"))
    assert one["tool_calls"][0]["id"] != two["tool_calls"][0]["id"]


@given(st.data())
def test_any_tree_of_requests_is_rows_without_loss(data: st.DataObject) -> None:
    """Harnesses go on from, go back to, cut and rewrite anything; every answer is trained on exactly once."""
    talk = Talk()
    words = st.sampled_from(["a", "b", "<|im_end|>", "x y", "<tool_call>", "é"])
    histories: list[list[Message]] = [[user("a")]]
    sampled = 0
    for _ in range(data.draw(st.integers(1, 8))):
        history = list(data.draw(st.sampled_from(histories)))
        if len(history) > 2 and data.draw(st.booleans()):
            at = data.draw(st.integers(1, len(history) - 1))
            history[at] = {**history[at], "content": data.draw(words)}
        says = data.draw(st.one_of(words.map(text), words.map(call)))
        ids = talk.renderer.assistant(says)
        said = talk.ask(history, says=ids)
        sampled += len(ids)
        histories.append([*history, said, *(results(said) if "tool_calls" in said else [user("go on")])])
    rows = talk.rows
    assert sum(sum(row.loss_mask) for row in rows) == sampled
    sent = sorted(map(tuple, talk.prompts))
    assert sent == sorted(tuple(row.ids[: turn.start]) for row in rows for turn in row.turns)
