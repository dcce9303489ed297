"""Every format of tool calls: written calls are read, broken ones are reported, and parsing never raises."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_envs.model.tool_formats.choice import FORMATS
from prorl_envs.model.tool_formats.reading import MAX_CALLS, Declared, ReadCall, continued, left_open
from prorl_envs.tools.types import ToolSpec

TOOLS = [
    ToolSpec(
        "bash",
        "Run.",
        {
            "type": "object",
            "properties": {
                "command": {"type": "string"},
                "count": {"type": "integer"},
                "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "paths": {"type": ["array", "null"]},
            },
        },
    )
]
DECLARED = Declared.of(TOOLS)
ARGUMENTS = {"command": 'echo "hi"\n', "count": 3}
JSON = json.dumps(ARGUMENTS)
CODER = (
    '<function=bash>\n<parameter=command>\necho "hi"\n\n</parameter>\n'
    "<parameter=count>\n3\n</parameter>\n</function>"
)
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
INVOKE = (
    '<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="command" string="true">echo "hi"\n'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="count" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>"
)

#: The same call in the format of each family.
WRITTEN = [
    ("hermes", f'<tool_call>\n{{"name": "bash", "arguments": {JSON}}}\n</tool_call>'),
    ("coder", f"<tool_call>\n{CODER}\n</tool_call>"),
    ("coder", CODER),
    (
        "glm",
        '<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>echo "hi"\n</arg_value>\n'
        "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    ),
    ("llama", f'{{"name": "bash", "parameters": {JSON}}}'),
    ("llama", f'<|python_tag|>{{"type": "function", "name": "bash", "parameters": {JSON}}}'),
    ("llama", f'{{"type": "function", "function": {{"name": "bash", "arguments": {JSON}}}}}'),
    ("deepseek", DEEPSEEK.replace("{}", f"function<｜tool▁sep｜>bash\n```json\n{JSON}\n```")),
    ("deepseek", DEEPSEEK.replace("{}", f"bash<｜tool▁sep｜>{JSON}")),
    ("dsml", f"<｜DSML｜function_calls>\n{INVOKE}\n</｜DSML｜function_calls>"),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    ("mistral", f'[TOOL_CALLS] [{{"name": "bash", "arguments": {JSON}, "id": "abcdefghi"}}]'),
    ("mistral", f"[TOOL_CALLS]bash[CALL_ID]abcdefghi[ARGS]{JSON}"),
    ("gemma", '<|tool_call>call:bash{command:<|"|>echo "hi"\n<|"|>,count:3}<tool_call|>'),
    ("harmony", f"<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{JSON}"),
    ("harmony", f" to=functions.bash<|channel|>commentary json<|message|>{JSON}<|call|>"),
]


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_a_call_is_read(name: str, text: str) -> None:
    turn = FORMATS[name].turn(text, declared=DECLARED)
    assert turn.calls == (ReadCall("bash", ARGUMENTS),)
    assert (turn.content, turn.malformed) == ("", ())


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_a_truncated_call_is_not_a_call(name: str, text: str) -> None:
    """For every length of the answer: no call before it is complete, and then the same one."""
    for end in range(len(text)):
        turn = FORMATS[name].turn(text[:end], declared=DECLARED)
        assert all(call.name == "bash" for call in turn.calls)
        assert all(call.arguments == ARGUMENTS for call in turn.calls), text[:end]
        assert all(len(message) < 400 for message in turn.malformed)


REASONED = [
    ("hermes", "<think>\n{thought}\n</think>\n\nSo.\n{call}"),
    ("coder", "<think>{thought}</think>So.{call}"),
    ("mistral", "[THINK]{thought}[/THINK]So.{call}"),
    ("gemma", "<|channel>thought\n{thought}\n<channel|>So.{call}"),
    (
        "harmony",
        "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>"
        "<|start|>assistant{call}",
    ),
]


@pytest.mark.parametrize(("name", "form"), REASONED)
def test_reasoning_is_separate_and_calls_in_it_are_ignored(name: str, form: str) -> None:
    call = dict(reversed(WRITTEN))[name]
    thought = "I could do it." if name == "harmony" else f"I could {call}"
    turn = FORMATS[name].turn(form.replace("{thought}", thought).replace("{call}", call), declared=DECLARED)
    assert turn.calls == (ReadCall("bash", ARGUMENTS),)
    assert (turn.content, turn.reasoning) == ("So.", thought)


def test_reasoning_may_be_opened_by_the_prompt() -> None:
    text = f"hm</think>{WRITTEN[0][1]}"
    turn = FORMATS["hermes"].turn(text, opened="</think>")
    assert (turn.reasoning, len(turn.calls)) == ("hm", 1)
    assert FORMATS["hermes"].turn("endless", opened="</think>").reasoning == "endless"


def test_values_have_their_declared_types() -> None:
    values = {"command": "3", "count": "x", "flag": "True", "paths": '["a"]', "other": "7"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    (call,) = FORMATS["coder"].turn(f"<function=bash>\n{text}</function>", declared=DECLARED).calls
    assert call.arguments == {"command": "3", "count": "x", "flag": True, "paths": ["a"], "other": "7"}


def test_values_may_contain_their_closing_tags() -> None:
    value = "a </parameter> </arg_value> b"
    text = f"<function=bash>\n<parameter=command>\n{value}\n</parameter>\n</function>"
    assert FORMATS["coder"].turn(text).calls == (ReadCall("bash", {"command": value}),)
    text = f"<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    assert FORMATS["glm"].turn(text).calls == (ReadCall("bash", {"command": value}),)


def test_an_answer_in_json_is_not_a_call() -> None:
    assert FORMATS["llama"].turn('{"name": "Ada", "born": 1815}').content == '{"name": "Ada", "born": 1815}'


def test_several_calls_of_one_turn() -> None:
    for name, text in WRITTEN:
        twice = f"{text}\n{text}" if name != "harmony" else text
        turn = FORMATS[name].turn(twice, declared=DECLARED)
        assert len(turn.calls) == (2 if name != "harmony" else 1), name
    many = f"[TOOL_CALLS]{json.dumps([{'name': 'bash', 'arguments': {}}] * 1000)}"
    assert len(FORMATS["mistral"].turn(many).calls) == MAX_CALLS


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=60)
def test_every_text_is_parsed(name: str, data: st.DataObject) -> None:
    whole = [text for form, text in WRITTEN if form == name]
    pieces = st.sampled_from(
        [*whole, *(t[:k] for t in whole for k in range(0, len(t), 5)), "<think>", "[" * 500]
    )
    text = data.draw(st.lists(pieces | st.text(max_size=6), max_size=12).map("".join))
    turn = FORMATS[name].turn(text, opened=data.draw(st.sampled_from(["", "</think>"])), declared=DECLARED)
    assert len(turn.calls) + len(turn.malformed) <= MAX_CALLS + 1
    assert json.dumps([call.arguments for call in turn.calls], ensure_ascii=False).encode()


DEEP: dict[str, str] = {
    "hermes": '<tool_call>{"name": "bash", "arguments": ',
    "deepseek": "<｜tool▁call▁begin｜>bash<｜tool▁sep｜>",
    "kimi": "<|tool_call_begin|>bash<|tool_call_argument_begin|>",
    "mistral": "[TOOL_CALLS]bash[ARGS]",
    "gemma": "<|tool_call>call:bash{x:",
    "llama": '{"name": "bash", "parameters": ',
    "harmony": " to=functions.bash<|channel|>commentary<|message|>",
}


@pytest.mark.parametrize("name", DEEP)
def test_too_deep_nesting_is_reported(name: str) -> None:
    turn = FORMATS[name].turn(DEEP[name] + '{"a":' * 100_000)
    assert turn.calls == ()
    assert any("deeply" in message or "cut off" in message for message in turn.malformed)


@pytest.mark.parametrize(
    ("prompt", "written", "sampled"),
    [
        ("a:", "a:yes", "yes"),
        ("a:<think>\n", "a:yes", "</think>\n\nyes"),
        ("a:<think>\n", "a:<think></think>yes", "</think>yes"),
        ("a:", "b:yes", None),
    ],
)
def test_the_sampled_part_of_a_written_message(prompt: str, written: str, sampled: Any) -> None:
    assert continued(prompt, written) == sampled


def test_a_tool_result_does_not_open_reasoning() -> None:
    assert left_open("tool: <think>\nassistant:", only_last=True) == ""
    assert left_open("assistant:<think>\n", only_last=True) == "</think>"
