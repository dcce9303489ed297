"""Turn ends found in templates of each convention, written as Python functions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from prorl_envs.errors import InputError
from prorl_envs.model.tokens.turn_ends import ANCHOR, TurnEnds, Write, find_ends

LITERALS = ["<end>", "<end>\n", "<user>", "<tool>", "<assistant>", "<call>", "<back>", "\n", "</s>"]
type Messages = Sequence[Mapping[str, Any]]


def said(message: Mapping[str, Any], *, as_text: bool) -> str:
    """Return the content of a message and its calls."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        calls.append(json.dumps(arguments) if as_text else arguments["value"])
    return str(message["content"]) + "".join(calls)


def chatml(messages: Messages, as_text: bool, prompt: bool) -> str:
    """One end for every turn."""
    turns = [f"<{message['role']}>{said(message, as_text=as_text)}<end>\n" for message in messages]
    return "".join(turns) + "<assistant>" * prompt


def three_ends(messages: Messages, as_text: bool, prompt: bool) -> str:
    """gpt-oss: the last turn, earlier turns and turns with calls end differently."""
    text = ""
    for place, message in enumerate(messages):
        last = place == len(messages) - 1
        end = "<call>" if message.get("tool_calls") else "<end>"
        end = "<back>" if last and message["role"] == "assistant" and end == "<end>" else end
        text += f"<{message['role']}>{said(message, as_text=as_text)}{end}"
    return text + "<assistant>" * prompt


def no_end(messages: Messages, as_text: bool, prompt: bool) -> str:
    """GLM: the start of the next turn ends a turn."""
    turns = [f"<{message['role']}>{said(message, as_text=as_text)}" for message in messages]
    return "".join(turns) + "<assistant>" * prompt


def text_only(messages: Messages, as_text: bool, prompt: bool) -> str:
    """DeepSeek: refuses arguments that are no text."""
    if not as_text and any("tool_calls" in message for message in messages):
        raise InputError("arguments are no text")
    return chatml(messages, as_text, prompt)


def without_calls(messages: Messages, as_text: bool, prompt: bool) -> str:
    """A template that shows no calls, only content."""
    shown = [{**message, "tool_calls": ()} for message in messages]
    return chatml([message for message in shown if message["content"]], as_text, prompt)


def without_results(messages: Messages, as_text: bool, prompt: bool) -> str:
    return chatml([message for message in messages if message["role"] != "tool"], as_text, prompt)


def results_first(messages: Messages, as_text: bool, prompt: bool) -> str:
    """A template that puts results inside the assistant's turn, before its end."""
    results = "".join(message["content"] for message in messages if message["role"] == "tool")
    others = [message for message in messages if message["role"] != "tool"]
    text = chatml(others, as_text, prompt=False)
    return text.removesuffix("<end>\n") + results + "<end>\n" + "<assistant>" * prompt


def tools_only(messages: Messages, as_text: bool, prompt: bool) -> str:
    """A template in which only results can follow an answer."""
    roles = [message["role"] for message in messages]
    if roles == ["user", "assistant", "user"]:
        raise InputError("a second question is not supported")
    return chatml(messages, as_text, prompt)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (chatml, TurnEnds("<end>\n", "<end>\n", "<end>\n")),
        (three_ends, TurnEnds("<end>", "<back>", "<call>")),
        (no_end, TurnEnds("<user>", "", "<tool>")),
        (text_only, TurnEnds("<end>\n", "<end>\n", "<end>\n", arguments_as_text=True)),
        (without_calls, TurnEnds("<end>\n", "<end>\n", "<end>\n", content_beside_calls=True)),
        (tools_only, TurnEnds("<end>\n", "<end>\n", "<end>\n")),
    ],
)
def test_the_ends_of_each_convention_are_found(write: Write, expected: TurnEnds) -> None:
    assert find_ends(write, LITERALS) == expected
    assert find_ends(write, reversed(LITERALS)) == expected


@pytest.mark.parametrize("write", [without_results, results_first])
def test_a_template_without_a_place_for_results_says_so_only_for_results(write: Write) -> None:
    ends = find_ends(write, LITERALS)
    assert (ends.text, ends.last, ends.calls, ends.stops) == ("<end>\n", "<end>\n", "", ("<end>\n",))
    assert ends.refusal is not None and "tool messages" in str(ends.refusal)


def no_second_turn(messages: Messages, as_text: bool, prompt: bool) -> str:
    if len(messages) > 2:
        raise InputError("no second turn")
    return chatml(messages, as_text, prompt)


def no_answer(messages: Messages, as_text: bool, prompt: bool) -> str:
    return chatml([message for message in messages if message["role"] != "assistant"], as_text, prompt)


def question_last(messages: Messages, as_text: bool, prompt: bool) -> str:
    """A template that sorts questions before answers."""
    return no_end(sorted(messages, key=lambda message: message["role"] == "assistant"), as_text, prompt)


@pytest.mark.parametrize(
    ("write", "literals", "reason"),
    [
        (chatml, ["\n", " "], "does not end assistant turns"),
        (no_second_turn, LITERALS, "no second turn"),
        (no_answer, LITERALS, "drops the assistant turn"),
        (question_last, LITERALS, "inside the assistant's turn, or nowhere"),
    ],
)
def test_a_template_without_ends_is_refused(write: Write, literals: list[str], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        find_ends(write, literals)


def test_stops_and_closing_tokens_of_each_convention() -> None:
    plain, three, none = (find_ends(write, LITERALS) for write in (chatml, three_ends, no_end))
    assert [ends.stops for ends in (plain, three, none)] == [
        ("<end>\n",), ("<back>", "<call>"), ("<user>", "<tool>"),
    ]  # fmt: skip
    assert [ends.closing for ends in (plain, three, none)] == [
        {"<end>\n"}, {"<end>", "<back>", "<call>"}, frozenset(),
    ]  # fmt: skip
    user, tool = {"role": "user", "content": "x"}, {"role": "tool", "content": "y"}
    assert (three.before([user]), three.before([tool, user])) == ("<end>", "<call>")


def test_a_stand_in_has_one_call_for_each_result() -> None:
    results = [
        {"role": "tool", "content": "a", "tool_call_id": "abc", "name": "bash"},
        {"role": "tool", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    stand_in = TurnEnds("<end>", "<end>", "<end>").stand_in(results)
    assert stand_in["content"] == ""
    assert [(call["id"], call["function"]["name"]) for call in stand_in["tool_calls"]] == [
        ("abc", "bash"),
        ("call00001", "tool"),
    ]
    assert ANCHOR in json.dumps(stand_in["tool_calls"])
    assert TurnEnds("<end>", "<end>", content_beside_calls=True).stand_in(results)["content"] == ANCHOR
    assert TurnEnds("<end>", "<end>").stand_in(results[2:]) == {"role": "assistant", "content": ANCHOR}
