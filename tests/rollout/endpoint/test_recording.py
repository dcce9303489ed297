"""Conversations in the formats of harnesses, and their rows of token ids, without HTTP."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.env.base import Message
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Sampled
from prorl_envs.rollout.api.types import Trajectory
from prorl_envs.rollout.endpoint.recording import Recording, key_of
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.tools.types import ToolSpec
from tests.rollout.endpoint.conftest import LS, check_rows, validated
from tests.support.families import family_renderer

TOOLS = [ToolSpec("ls", "", LS)]


class Talk:
    """A recording, and the model's next answers."""

    def __init__(self, renderer: TemplateRenderer | None = None, reasoning: Any = "keep") -> None:
        self.renderer = renderer or builtin_renderer()
        self.recording = Recording(self.renderer, reasoning)
        self.prompts: list[list[int]] = []

    def ask(self, messages: Sequence[Message], *, says: Message | list[int]) -> Message:
        """Make one call; return the message that a harness would add to its history."""
        pending = self.recording.prompt(validated(messages), TOOLS)
        ids = says if isinstance(says, list) else self.renderer.assistant(says)
        sampled = Sampled(tuple(ids), (-0.5,) * len(ids), "stop", "1", "here")
        self.prompts.append(list(pending.ids))
        turn, _ = self.recording.record_answer(pending, sampled, asked_at=1.0, now=2.0)
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
def test_a_continued_conversation_is_one_row(family: str) -> None:
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


@pytest.mark.parametrize("family", ["hermes", "coder"])
def test_readable_calls_beside_an_unreadable_one_are_sent(family: str) -> None:
    """The text contains the unreadable call, and the next request continues the same row."""
    renderer = family_renderer(family)
    broken = {
        "hermes": '<tool_call>\n{"name": "ls", "arguments": {"command": "ls}}\n</tool_call>',
        "coder": "<tool_call>\n<function=ls>\n<parameter=command>\nls\n</function>\n</tool_call>",
    }[family]
    ids = [*renderer.tokenizer.encode(broken).ids, *renderer.assistant(call("pwd"))]
    talk = Talk(renderer)
    history = [user("Look.")]
    said = talk.ask(history, says=ids)
    assert [json.loads(each["function"]["arguments"]) for each in said["tool_calls"]] == [{"command": "pwd"}]
    assert broken in said["content"]
    history += [said, *results(said)]
    talk.ask(history, says=text("Done."))
    (row,) = talk.rows
    assert len(row.turns) == 2


@pytest.mark.parametrize("reasoning", ["user_turn", "template"])
def test_a_rewritten_history_is_sent_once(reasoning: str) -> None:
    """The template drops reasoning before a user message: the new prompt replaces the old one."""
    renderer = family_renderer("coder")
    talk = Talk(renderer, reasoning)
    thought = {**text("Here."), "reasoning_content": "Hm."}
    history = [user("Look.")]
    history += [talk.ask(history, says=thought), user("And now?")]
    talk.ask(history, says=text("There."))
    first, second = talk.prompts
    assert second == renderer.prompt(validated(history), TOOLS)
    assert renderer.decode(second).count("Look.") == 1 and "Hm." not in renderer.decode(second)
    one, two = talk.rows
    assert (one.ids[: len(first)], two.ids[: len(second)]) == (first, second)
    assert (two.parent, two.shared_prefix_len) == (None, 0)


def test_new_messages_follow_the_sampled_answer() -> None:
    talk = Talk()
    said = talk.ask([user("Look.")], says=call("ls"))
    history = [user("Look."), said, *results(said, "first"), user("second")]
    talk.ask(history, says=text("c"))
    (row,) = talk.rows
    before, after = talk.prompts
    answer = row.ids[row.turns[0].start : row.turns[0].end]
    assert after[: len(before) + len(answer)] == [*before, *answer]
    new = talk.renderer.decode(after[len(before) + len(answer) :])
    assert new.index("first") < new.index("second") and "Look." not in new


def test_the_last_known_answer_is_found_among_other_messages() -> None:
    """A harness may add any number of messages at once, and its history may start with an answer."""
    greeting = text("Hello.")
    for added in ([user("b")], [user("b"), user("c")], [user("b"), user("c"), user("d")]):
        talk = Talk()
        history = [greeting, user("a")]
        history += [talk.ask(history, says=text("1")), *added]
        talk.ask(history, says=text("2"))
        (row,) = talk.rows
        assert len(row.turns) == 2


def test_time_between_an_answer_and_the_next_request_counts_as_tool_time() -> None:
    recording, renderer = Recording(builtin_renderer()), builtin_renderer()
    history, says = [user("a")], Sampled(tuple(renderer.assistant(text("b"))), (), "stop", "", "")
    for asked_at, now in ((1.0, 3.0), (7.0, 8.0), (7.5, 9.0)):
        pending = recording.prompt(validated(history), TOOLS)
        _, messages = recording.record_answer(pending, says, asked_at=asked_at, now=now)
        history = [*messages, user("more")]
    trajectory = recording.trajectory()
    assert trajectory is not None
    assert [turn.tools_s for turn in trajectory.turns] == [4.0, 0.0, 0.0]
    assert [turn.model_s for turn in trajectory.turns] == [2.0, 1.0, 1.5]
    assert (recording.turns, recording.tools_s, recording.model_s) == (3, 4.0, 4.5)


def test_answers_without_a_waiting_client_are_rows_of_their_own() -> None:
    talk = Talk()
    said = talk.ask([user("a")], says=text("b"))
    pending = talk.recording.prompt(validated([user("a"), said, user("c")]), TOOLS)
    half = Sampled((5, 6), (-0.1, -0.2), "abort", "1", "here")
    talk.recording.record_unfinished(pending, half, asked_at=1.0, now=4.0)
    (kept,) = talk.rows
    (aborted,) = talk.recording.unfinished_answers
    assert len(kept.turns) == 1 and talk.recording.turns == 2
    assert aborted.ids == [*pending.ids, 5, 6] and aborted.loss_mask[-2:] == [1, 1]
    assert (aborted.parent, aborted.shared_prefix_len, aborted.drift) == (0, pending.shared, 0)
    assert talk.recording.sampled_tokens == sum(kept.loss_mask) + 2
    assert talk.recording.model_s == 1.0 + 3.0


def test_conversations_are_equal_only_if_every_part_is() -> None:
    """White space around an answer and the spelling of its calls' JSON may differ."""
    start = key_of(b"", user("a"))
    assert key_of(b"", user("a ")) != start != key_of(b"", {"role": "system", "content": "a"})
    assert key_of(start, text(" b\n")) == key_of(start, text("b")) != key_of(b"", text("b"))
    assert key_of(start, text("b")) != key_of(start, user("b"))
    spelt = call("ls")
    spelt["tool_calls"][0]["function"]["arguments"] = '{ "command" : "ls" }'
    assert key_of(start, spelt) == key_of(start, call("ls")) != key_of(start, call("cat"))
    assert key_of(start, call("ls")) != key_of(start, text(""))
    broken = call("ls")
    broken["tool_calls"][0]["function"]["arguments"] = "{"
    assert key_of(start, broken) != key_of(start, call("ls"))


def test_another_tokenisation_is_kept() -> None:
    """The sampled ids differ from the template's tokenisation; the next prompt contains them unchanged."""
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
def test_different_spellings_of_the_history_do_not_fork(changed: Any) -> None:
    talk = Talk()
    said = talk.ask([user("a")], says=call("ls  -l"))
    kept = changed(said)
    history = [user("a"), {**kept, "content": kept["content"] or ""}, *results(said)]
    talk.ask(history, says=text("b"))
    assert len(talk.rows) == 1


def test_a_retry_is_a_row_of_its_own_with_shared_context() -> None:
    talk = Talk()
    said = talk.ask([user("a")], says=call("ls"))
    history = [user("a"), said, *results(said)]
    talk.ask(history, says=text("one"))
    talk.ask(history, says=text("two"))
    first, second = talk.rows
    assert (len(first.turns), len(second.turns)) == (2, 1)
    assert second.parent == 0 and second.shared_prefix_len == first.turns[0].end
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


def test_a_rewritten_answer_is_context_after_the_recorded_one() -> None:
    talk = Talk()
    first = talk.ask([user("a")], says=text("one"))
    second = talk.ask([user("a"), first, user("b")], says=text("a secret"))
    assert second["content"] == "a secret"
    history = [user("a"), first, user("b"), text("[redacted]"), user("c")]
    talk.ask(history, says=text("three"))
    main, branch = talk.rows
    assert branch.parent == 0 and branch.shared_prefix_len == main.turns[0].end
    shown = talk.renderer.decode(branch.ids)
    assert "[redacted]" in shown and "a secret" not in shown
    assert len(branch.turns) == 1


def test_other_tools_or_another_system_prompt_start_a_new_row() -> None:
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
        talk.recording.record_answer(pending, sampled, asked_at=0.0, now=1.0)
    first, second = talk.rows
    assert (len(first.turns), len(second.turns)) == (2, 1)
    assert first.ids[: first.turns[1].start] == list(two.ids) and second.ids[: second.turns[0].start] == list(
        one.ids
    )


def test_calls_with_equal_text_have_different_ids() -> None:
    talk = Talk()
    one = talk.ask([user("a")], says=call("ls"))
    two = talk.ask([user("a"), one, *results(one)], says=call("ls"))
    assert one["tool_calls"][0]["id"] != two["tool_calls"][0]["id"]


@given(st.data())
def test_any_tree_of_requests_becomes_rows_without_loss(data: st.DataObject) -> None:
    """Harnesses may continue, repeat, cut and rewrite any history; every answer is trained on exactly
    once."""
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


def test_a_recording_without_an_answer_has_no_rows() -> None:
    recording = Recording(builtin_renderer(), "keep")
    recording.prompt([user("Hello.")], TOOLS)
    assert recording.trajectory() is None
    assert (recording.forks, recording.unfinished_answers, recording.turns, len(recording)) == ([], [], 0, 0)
