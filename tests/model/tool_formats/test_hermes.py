"""Parsing of tool calls: never raises, is bounded, and explains unreadable calls."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.model.tool_formats.marked import Hermes
from prorl_envs.model.tool_formats.reading import MAX_CALLS, ReadCall

read_turn = Hermes().turn


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_content_and_several_calls() -> None:
    turn = read_turn(f"First.\n{call('bash', {'command': 'ls'})}\nthen\n{call('finish', {})}\n")
    assert turn.calls == (ReadCall("bash", {"command": "ls"}), ReadCall("finish", {}))
    assert turn.content.split() == ["First.", "then"]
    assert turn.malformed == ()


def test_plain_text_has_no_calls() -> None:
    assert read_turn("I am done.") == read_turn("  I am done.\n")
    assert read_turn("I am done.").calls == ()


def test_arguments_may_contain_the_closing_tag() -> None:
    arguments = {"text": "a </tool_call> b <tool_call>{}"}
    turn = read_turn(call("write", arguments))
    assert turn.calls == (ReadCall("write", arguments),)
    assert turn.content == ""


def test_arguments_as_a_json_string() -> None:
    for encoded in ('{"command": "ls"}', json.dumps('{"command": "ls"}')):
        assert read_turn(call("bash", encoded)).calls == (ReadCall("bash", {"command": "ls"}),)


@pytest.mark.parametrize(
    "more",
    ["", ', "arguments": {}', ', "arguments": null', ', "arguments": ""', ', "arguments": " "', ', "id": 1'],
)
def test_missing_arguments_are_none(more: str) -> None:
    text = f'<tool_call>{{"name": "finish"{more}}}</tool_call>'
    assert read_turn(text).calls == (ReadCall("finish", {}),)


def test_arguments_under_another_key_are_not_lost() -> None:
    text = '<tool_call>{"name": "bash", "%s": {"command": "ls"}}</tool_call>'
    assert read_turn(text % "parameters").calls == (ReadCall("bash", {"command": "ls"}),)
    for key in ("args", "input", "command"):
        turn = read_turn(text % key)
        assert (turn.calls, len(turn.malformed)) == ((), 1)
        assert f"no arguments, but '{key}'" in turn.malformed[0]


def test_the_last_of_duplicate_keys_counts() -> None:
    text = '<tool_call>{"name": "a", "name": "b", "arguments": {"x": 1, "x": 2}}</tool_call>'
    assert read_turn(text).calls == (ReadCall("b", {"x": 2}),)


def test_raw_newlines_in_strings_are_accepted() -> None:
    text = '<tool_call>{"name": "bash", "arguments": {"command": "a\nb"}}</tool_call>'
    assert read_turn(text).calls == (ReadCall("bash", {"command": "a\nb"}),)


def test_a_missing_closing_tag_at_the_end_is_accepted() -> None:
    assert read_turn('<tool_call>{"name": "finish", "arguments": {}}\n').calls == (ReadCall("finish", {}),)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"name": "bash", "arguments": {"command": "ls"', "cut off"),
        ('{"name": "bash", "arguments": {"command": "ls', "cut off"),
        ('{"name": "bash" "arguments": {}}</tool_call>', "not valid"),
        ("bash ls</tool_call>", "not a JSON object"),
        ('["bash"]</tool_call>', "not a JSON object"),
        ("", "not a JSON object"),
        ('{"arguments": {}}</tool_call>', "no usable name"),
        ('{"name": 7, "arguments": {}}</tool_call>', "no usable name"),
        ('{"name": "%s", "arguments": {}}</tool_call>' % ("x" * 1000), "no usable name"),
        ('{"name": "bash", "arguments": [1]}</tool_call>', "not a JSON object"),
        ('{"name": "bash", "arguments": "ls"}</tool_call>', "not a JSON object"),
        ('{"name": "bash", "arguments": {"x": NaN}}</tool_call>', "cannot be read"),
        ('{"name": "bash", "arguments": {"x": %s}}</tool_call>' % ("9" * 10_000), "cannot be read"),
        ('{"name": "bash", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogate"),
        ('{"name": "bash", "arguments": {"x": %s}}</tool_call>' % ("[" * 100 + "]" * 100), "too deeply"),
        ('{"name": "bash", "arguments": {"x": %s' % ("[" * 200_000), "too deeply"),
        ('{"name": "finish", "arguments": {}} and more</tool_call>', "text between"),
    ],
)
def test_errors_are_explained_briefly(body: str, says: str) -> None:
    turn = read_turn(f"Try.\n<tool_call>\n{body}")
    assert turn.calls == ()
    assert len(turn.malformed) == 1
    assert says in turn.malformed[0]
    assert len(turn.malformed[0]) < 250


def test_a_malformed_call_does_not_hide_the_next() -> None:
    turn = read_turn(f"<tool_call>{{oops</tool_call>{call('finish', {})}<tool_call>{{oops {call('bash', {})}")
    assert [read.name for read in turn.calls] == ["finish", "bash"]
    assert len(turn.malformed) == 2


def test_calls_are_bounded() -> None:
    turn = read_turn(call("finish", {}) * 1000)
    assert len(turn.calls) == MAX_CALLS
    assert len(turn.malformed) == 1


def test_calls_in_reasoning_are_not_calls() -> None:
    text = f"<think>I could {call('rm', {})}</think>No. {call('finish', {})}"
    assert [read.name for read in read_turn(text).calls] == ["finish"]
    assert read_turn(text.removeprefix("<think>"), opened="</think>").calls == (ReadCall("finish", {}),)
    assert read_turn(f"<think>endless {call('rm', {})}").calls == ()


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "a", "arguments": {}}',
        "{",
        '"',
        "[",
        "\n",
    ]
)


@given(st.lists(FRAGMENTS | st.text(max_size=8), max_size=40).map("".join), st.booleans())
def test_every_text_is_parsed(text: str, thinking: bool) -> None:
    turn = read_turn(text, opened="</think>" if thinking else "")
    assert len(turn.calls) + len(turn.malformed) <= MAX_CALLS + 1
    assert all(len(message) < 300 for message in turn.malformed)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.text(min_size=1, max_size=50), st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_written_calls_are_parsed(name: str, arguments: dict[str, object], escape: bool) -> None:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=escape)
    turn = read_turn(f"<tool_call>\n{body}\n</tool_call>")
    assert turn.calls == (ReadCall(name, arguments),)
