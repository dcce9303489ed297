"""Formats of tool calls: valid calls are parsed, broken calls are reported; parsing never raises."""

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
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="bash">\n<parameter name="command">echo "hi"\n</parameter>\n'
    '<parameter name="count">3</parameter>\n</invoke>\n</minimax:tool_call>'
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
    ("llama", f'<|python_start|>{{"name": "bash", "parameters": {JSON}}}<|python_end|>'),
    ("llama", f'{{"type": "function", "function": {{"name": "bash", "arguments": {JSON}}}}}'),
    ("deepseek", DEEPSEEK.replace("{}", f"function<｜tool▁sep｜>bash\n```json\n{JSON}\n```")),
    ("deepseek", DEEPSEEK.replace("{}", f"bash<｜tool▁sep｜>{JSON}")),
    ("dsml", f"<｜DSML｜function_calls>\n{INVOKE}\n</｜DSML｜function_calls>"),
    ("minimax", MINIMAX),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    ("mistral", f'[TOOL_CALLS] [{{"name": "bash", "arguments": {JSON}, "id": "abcdefghi"}}]'),
    ("mistral", f"[TOOL_CALLS]bash[CALL_ID]abcdefghi[ARGS]{JSON}"),
    ("gemma", '<|tool_call>call:bash{command:<|"|>echo "hi"\n<|"|>,count:3}<tool_call|>'),
    ("pythonic", '[bash(command="echo \\"hi\\"\\n", count=3)]'),
    ("pythonic", "<|python_start|>[bash(command='echo \"hi\"\\n', count='3')]<|python_end|>"),
    ("pythonic", '[\n  bash(\n    command="""echo "hi"\n""",\n    count=3,\n  )\n]'),
    (
        "functiongemma",
        '<start_function_call>call:bash{command:<escape>echo "hi"\n<escape>,count:3}<end_function_call>',
    ),
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
    """Prefixes of an answer have no call before the call is complete, and then always the same call."""
    for end in range(len(text)):
        turn = FORMATS[name].turn(text[:end], declared=DECLARED)
        assert all(call.name == "bash" for call in turn.calls)
        assert all(call.arguments == ARGUMENTS for call in turn.calls), text[:end]
        assert all(len(message) < 400 for message in turn.malformed)


NO_ARGUMENTS = [
    ("hermes", '<tool_call>{"name": "bash"}</tool_call>'),
    ("llama", '{"name": "bash", "parameters": null}'),
    ("mistral", '[TOOL_CALLS][{"name": "bash", "arguments": ""}]'),
    ("kimi", "<|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|> <|tool_call_end|>"),
    ("deepseek", DEEPSEEK.replace("{}", "bash<｜tool▁sep｜>")),
    ("deepseek", DEEPSEEK.replace("{}", "function<｜tool▁sep｜>bash\n```json\n```")),
    ("harmony", "<|channel|>commentary to=functions.bash <|constrain|>json<|message|><|call|>"),
    ("pythonic", "[bash()]"),
]


@pytest.mark.parametrize(("name", "text"), NO_ARGUMENTS)
def test_a_call_may_have_no_arguments(name: str, text: str) -> None:
    turn = FORMATS[name].turn(text, declared=DECLARED)
    assert (turn.calls, turn.content, turn.malformed) == ((ReadCall("bash", {}),), "", ())


@pytest.mark.parametrize("end", ["<|tool_call_end|>", "<｜tool▁call▁end｜>", "<|call|>"])
def test_a_call_without_arguments_and_end_was_cut_off(end: str) -> None:
    name, text = next(pair for pair in NO_ARGUMENTS if end in pair[1])
    turn = FORMATS[name].turn(text.partition(end)[0])
    assert (turn.calls, len(turn.malformed)) == ((), 1)


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


@pytest.mark.parametrize(
    ("name", "opening", "close"),
    [
        ("hermes", "<think>", "</think>"),
        ("coder", "<think>", "</think>"),
        ("glm", "<think>", "</think>"),
        ("kimi", "<think>", "</think>"),
        ("kimi", "◁think▷", "◁/think▷"),
        ("deepseek", "<think>", "</think>"),
        ("dsml", "<think>", "</think>"),
        ("mistral", "[THINK]", "[/THINK]"),
        ("gemma", "<|channel>thought\n", "<channel|>"),
    ],
)
@pytest.mark.parametrize("after", ["", "\nHm, or not?"])
def test_a_call_in_unclosed_reasoning_is_reported(name: str, opening: str, close: str, after: str) -> None:
    call = dict(WRITTEN)[name]
    thought = f"I look.\n{call}{after}"
    for text, opened in ((f"{opening}{thought}", ""), (thought, close), (f"{opening}{thought}", close)):
        turn = FORMATS[name].turn(text, opened=opened, declared=DECLARED)
        assert (turn.calls, turn.content, turn.reasoning) == ((), "", thought)
        assert len(turn.malformed) == 1
        assert f"{close} is missing" in turn.malformed[0]
        assert FORMATS[name].form in turn.malformed[0]
        draft = FORMATS[name].turn(f"{text}{close}", opened=opened, declared=DECLARED)
        assert (draft.calls, draft.malformed) == ((), ())
        both = FORMATS[name].turn(f"{text}{close}\n{call}", opened=opened, declared=DECLARED)
        assert (both.calls, both.malformed) == ((ReadCall("bash", ARGUMENTS),), ())


def test_reasoning_does_not_end_within_a_call() -> None:
    for name in ("hermes", "coder", "glm", "kimi"):
        call = dict(WRITTEN)[name].replace("echo", "</think> <tool_call> echo")
        for opening, opened in (("<think>I look. ", ""), ("", "</think>")):
            turn = FORMATS[name].turn(f"{opening}{call}", opened=opened, declared=DECLARED)
            assert (turn.calls, turn.content, len(turn.malformed)) == ((), "", 1), name
            turn = FORMATS[name].turn(f"{opening}{call}</think>{call}", opened=opened, declared=DECLARED)
            assert (len(turn.calls), turn.content, turn.malformed) == (1, "", ()), name
    draft = '<think>I write <tool_call>{"name": "bash", </think>'
    assert len(FORMATS["hermes"].turn(draft + WRITTEN[0][1]).calls) == 1
    draft = "<think>I write <tool_call>\n<function=bash>\n<parameter=command>\n</think>"
    assert len(FORMATS["coder"].turn(draft + WRITTEN[1][1]).calls) == 1


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("<think>a</think>\n<think>{0}</think>{1}", "a\n\n{0}"),
        ("<think>a</think><think>b</think><think>{0}</think>{1}", "a\n\nb\n\n{0}"),
        ("<think>a</think><think>{1}", "a"),
        ("<think>a</think>Then: <think>{1}", "a"),
    ],
)
def test_a_draft_in_further_reasoning_does_not_count(text: str, reasoning: str) -> None:
    written = [f'<tool_call>{{"name": "f", "arguments": {{"n": {n}}}}}</tool_call>' for n in (0, 1)]
    for n in (0, 1):
        text, reasoning = (each.replace(f"{{{n}}}", written[n]) for each in (text, reasoning))
    turn = FORMATS["hermes"].turn(text)
    assert (turn.reasoning, turn.malformed) == (reasoning, ())
    assert turn.calls == (ReadCall("f", {"n": 1}),)


@pytest.mark.parametrize(("name", "form"), REASONED[:-1])
def test_reasoning_may_lack_its_start(name: str, form: str) -> None:
    call = dict(reversed(WRITTEN))[name]
    start = form.partition("{thought}")[0]
    thought = f"I could {call}, or not."
    text = form.removeprefix(start).replace("{thought}", thought).replace("{call}", call)
    turn = FORMATS[name].turn(text, declared=DECLARED)
    assert (turn.calls, turn.content, turn.reasoning) == ((ReadCall("bash", ARGUMENTS),), "So.", thought)


def test_the_end_of_reasoning_in_a_call_or_after_a_start_ends_nothing_before() -> None:
    arguments = {"command": "echo '</think>'"}
    call = f'<tool_call>{{"name": "bash", "arguments": {json.dumps(arguments)}}}</tool_call>'
    for text in (call, f"So.{call}", f"{call}{call}"):
        turn = FORMATS["hermes"].turn(text)
        assert turn.calls == (ReadCall("bash", arguments),) * text.count("<tool_call>")
        assert turn.reasoning == ""
    turn = FORMATS["hermes"].turn(f"Then: <think>no</think>{call}")
    assert (turn.content, len(turn.calls), turn.reasoning) == ("Then: <think>no</think>", 1, "")
    turn = FORMATS["hermes"].turn(f"{call} or not.</think>{call}")
    assert (len(turn.calls), turn.content, turn.reasoning) == (1, "", f"{call} or not.")


def test_unclosed_reasoning_without_a_call_is_not_reported() -> None:
    for name in FORMATS:
        turn = FORMATS[name].turn("<think>I compare a < b, [1] and {2}.")
        assert (turn.calls, turn.malformed) == ((), ())


def test_values_have_their_declared_types() -> None:
    values = {"command": "3", "count": "x", "flag": "True", "paths": '["a"]', "other": "7"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    (call,) = FORMATS["coder"].turn(f"<function=bash>\n{text}</function>", declared=DECLARED).calls
    assert call.arguments == {"command": "3", "count": "x", "flag": True, "paths": ["a"], "other": "7"}


SCHEMA = {
    "type": "object",
    "$defs": {
        "count": {"type": "integer"},
        "alias": {"$ref": "#/$defs/count"},
        "point": {"type": "object", "properties": {"x": {"type": "number"}}},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "integer"}]},
        "me": {"$ref": "#/$defs/me"},
        "a/b~c d": {"type": "boolean"},
        "text": {"type": "string"},
    },
    "definitions": {"old": {"type": "array"}},
    "properties": {
        "ref": {"$ref": "#/$defs/count", "description": "How many."},
        "alias": {"$ref": "#/$defs/alias"},
        "old": {"$ref": "#/definitions/old"},
        "sibling": {"$ref": "#/properties/alias"},
        "point": {"$ref": "#/$defs/point"},
        "escaped": {"$ref": "#/$defs/a~1b~0c%20d"},
        "loop": {"$ref": "#/$defs/loop"},
        "me": {"$ref": "#/$defs/me"},
        "nowhere": {"$ref": "#/$defs/none"},
        "far": {"$ref": "https://example.com/schema.json"},
        "ref_text": {"$ref": "#/$defs/text"},
        "all": {"allOf": [{"$ref": "#/$defs/count"}, {"description": "How many."}]},
        "all_text": {"allOf": [{"$ref": "#/$defs/text"}, {"minLength": 1}]},
        "narrow": {"type": ["string", "integer"], "allOf": [{"type": "integer"}]},
        "nested": {"anyOf": [{"allOf": [{"$ref": "#/$defs/count"}]}, {"type": "null"}]},
        "one": {"oneOf": [{"$ref": "#/$defs/count"}, {"$ref": "#/definitions/old"}]},
        "optional_text": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]},
        "optional_any": {"anyOf": [{}, {"type": "null"}]},
        "enum": {"enum": [1, 2, 3]},
        "enum_text": {"enum": ["1", "2"]},
        "enum_mixed": {"enum": ["auto", "2", 1, None]},
        "typed_enum": {"type": "integer", "enum": [1, 2]},
        "const": {"const": 7},
        "const_text": {"const": "7"},
        "const_flag": {"const": True},
        "untyped": {"description": "Anything."},
        "true": True,
    },
}


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("ref", "3", 3),
        ("ref", "three", "three"),
        ("alias", "3", 3),
        ("old", "[1, 2]", [1, 2]),
        ("sibling", "3", 3),
        ("point", '{"x": 1.5}', {"x": 1.5}),
        ("escaped", "true", True),
        ("escaped", "False", False),
        ("loop", "3", 3),
        ("me", "3", "3"),
        ("nowhere", "3", "3"),
        ("nowhere", "[3]", [3]),
        ("far", '{"a": 1}', {"a": 1}),
        ("ref_text", "3", "3"),
        ("ref_text", '{"a": 1}', '{"a": 1}'),
        ("all", "3", 3),
        ("all_text", "[3]", "[3]"),
        ("narrow", "3", 3),
        ("nested", "3", 3),
        ("nested", "null", None),
        ("one", "3", 3),
        ("one", "[3]", [3]),
        ("optional_text", "3", "3"),
        ("optional_any", "None", None),
        ("optional_any", "3", "3"),
        ("optional_any", '{"a": [1]}', {"a": [1]}),
        ("enum", "2", 2),
        ("enum_text", "2", "2"),
        ("enum_mixed", "1", 1),
        ("enum_mixed", "2", "2"),
        ("enum_mixed", "auto", "auto"),
        ("enum_mixed", "null", None),
        ("typed_enum", "2", 2),
        ("const", "7", 7),
        ("const_text", "7", "7"),
        ("const_flag", "True", True),
        ("untyped", '{"a": 1}', {"a": 1}),
        ("untyped", " [1, 2]\n", [1, 2]),
        ("untyped", "7", "7"),
        ("untyped", "true", "true"),
        ("untyped", '"quoted"', '"quoted"'),
        ("untyped", "[ -f x ]", "[ -f x ]"),
        ("old", "['a', \"it's\", None]", ["a", "it's", None]),
        ("old", r"['it\'s \"a\"', ' \n']", ['it\'s "a"', " \n"]),
        ("point", "{'x': 1.5, 'y': True}", {"x": 1.5, "y": True}),
        ("point", "{'x': Truest, 'y': 'True'}", "{'x': Truest, 'y': 'True'}"),
        ("point", "{'x': 'None'}", {"x": "None"}),
        ("point", "{'x': 'open}", "{'x': 'open}"),
        ("point", "['a']", "['a']"),
        ("old", "(1, 2)", "(1, 2)"),
        ("old", "open('/etc/passwd')", "open('/etc/passwd')"),
        ("ref", "'3'", "'3'"),
        ("ref", "None", "None"),
        ("untyped", "['a']", "['a']"),
        ("ref_text", "{'a': 1}", "{'a': 1}"),
        ("true", '{"a": 1}', {"a": 1}),
        ("undeclared", '{"a": 1}', {"a": 1}),
        ("undeclared", "7", "7"),
    ],
)
def test_values_are_converted_by_their_schemas(parameter: str, text: str, value: Any) -> None:
    declared = Declared.of([ToolSpec("f", "Do.", SCHEMA)])
    written = {
        "coder": f"<function=f>\n<parameter={parameter}>\n{text}\n</parameter>\n</function>",
        "glm": f"<tool_call>f<arg_key>{parameter}</arg_key><arg_value>{text}</arg_value></tool_call>",
        "dsml": f'<｜DSML｜invoke name="f"><｜DSML｜parameter name="{parameter}">{text}</｜DSML｜parameter>'
        "</｜DSML｜invoke>",
    }
    for name, call in written.items():
        (read,) = FORMATS[name].turn(call, declared=declared).calls
        assert repr(read.arguments) == repr({parameter: value})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/arguments", "$defs": {"arguments": {"properties": {"n": {"type": "integer"}}}}},
        {"allOf": [{"properties": {"n": {"type": "integer"}}}, {"required": ["n"]}]},
        {"oneOf": [{"properties": {"n": {"type": "integer"}}}, {"properties": {"n": {"type": "null"}}}]},
        {"type": "object", "additionalProperties": {"type": "integer"}},
    ],
)
def test_properties_may_be_in_parts_of_a_schema(schema: dict[str, Any]) -> None:
    assert Declared.of([ToolSpec("f", "Do.", schema)]).value("f", "n", "3") == 3


def test_hostile_schemas_are_read_quickly() -> None:
    twice = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(900):
        deep = {"allOf": [deep]}
    odd = {"type": [{}, 3], "enum": 3, "anyOf": {}, "allOf": [None, 7], "$ref": 5}
    places = {"list": {"$ref": "#/$defs/list/anyOf/9" + "9" * 30}, "deep": deep, "odd": odd}
    properties = {**places, "twice": {"$ref": "#/$defs/d0"}}
    declared = Declared.of(
        [ToolSpec("f", "Do.", {"$defs": {**twice, "list": {"anyOf": []}}, "properties": properties})]
    )
    assert [declared.value("f", name, "x") for name in properties] == ["x"] * 4


def test_values_may_contain_their_closing_tags() -> None:
    value = "a </parameter> </arg_value> b"
    text = f"<function=bash>\n<parameter=command>\n{value}\n</parameter>\n</function>"
    assert FORMATS["coder"].turn(text).calls == (ReadCall("bash", {"command": value}),)
    text = f"<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    assert FORMATS["glm"].turn(text).calls == (ReadCall("bash", {"command": value}),)


def test_an_answer_in_json_is_not_a_call() -> None:
    assert FORMATS["llama"].turn('{"name": "Ada", "born": 1815}').content == '{"name": "Ada", "born": 1815}'


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("functions.bash:0", "bash"),
        ("bash:0", "bash"),
        ("functions_bash_0", "bash"),
        ("functionsbash5", "bash"),
        ("functions.bash0", "bash"),
        ("functions.read_file:2", "read_file"),
        ("functions_read_file_2", "read_file"),
        ("functions_list_2_0", "list_2"),
        # an id that fits two tools or none
        ("functions_list_20", "functions_list_20"),
        ("functionsbasher0", "functionsbasher0"),
        ("functions_rebash_0", "functions_rebash_0"),
        ("call_1a2b", "call_1a2b"),
        ("0", "0"),
    ],
)
def test_kimis_ids_name_tools_without_separators_too(said: str, name: str) -> None:
    declared = Declared.of([ToolSpec(tool, "", {}) for tool in ("bash", "read_file", "list", "list_2")])
    text = f"<|tool_call_begin|>{said} <|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert FORMATS["kimi"].turn(text, declared=declared).calls == (ReadCall(name, {}),)


@pytest.mark.parametrize("end", ["<|tool_call_end|>", ""])
@pytest.mark.parametrize("section", ["<|tool_calls_section_{}|>", "<|tool_call_section_{}|>"])
def test_kimis_sections_have_two_spellings_and_may_end_a_call(section: str, end: str) -> None:
    call = f"<|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{JSON}{end}"
    turn = FORMATS["kimi"].turn(section.replace("{}", "begin") + call + section.replace("{}", "end"))
    assert (turn.calls, turn.content, turn.malformed) == ((ReadCall("bash", ARGUMENTS),), "", ())


def test_deepseeks_first_call_may_lack_its_start() -> None:
    call = f"function<｜tool▁sep｜>bash\n```json\n{JSON}\n```"
    text = f"<｜tool▁calls▁begin｜>{call}<｜tool▁call▁end｜>"
    for more in (0, 1):
        following = f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" * more
        turn = FORMATS["deepseek"].turn(f"{text}\n{following}<｜tool▁calls▁end｜>")
        assert (turn.calls, turn.content) == ((ReadCall("bash", ARGUMENTS),) * (1 + more), "")
    broken = text.replace("{", "", 1)
    assert len(FORMATS["deepseek"].turn(broken).malformed) == 1
    for nothing in ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>"):
        turn = FORMATS["deepseek"].turn(f"Hm.{nothing}")
        assert (turn.calls, turn.content, turn.malformed) == ((), "Hm.", ())


def test_a_llama_answer_may_be_a_list_of_calls() -> None:
    one = f'{{"name": "bash", "parameters": {JSON}}}'
    for tag in ("", "<|python_tag|>", "\n"):
        turn = FORMATS["llama"].turn(f"{tag}[{one}, {one}]")
        assert (turn.calls, turn.content) == ((ReadCall("bash", ARGUMENTS),) * 2, "")
    turn = FORMATS["llama"].turn(f"[{one}, {one}")
    assert (turn.calls, len(turn.malformed)) == ((), 1)
    for answer in ('[{"name": "Ada", "born": 1815}]', f"[1, {one}]", f"These: [{one}]"):
        turn = FORMATS["llama"].turn(answer)
        assert (turn.calls, turn.content, turn.malformed) == ((), answer, ())


def test_a_tag_outside_a_minimax_block_is_prose() -> None:
    text = MINIMAX.removeprefix("<minimax:tool_call>\n").removesuffix("\n</minimax:tool_call>")
    turn = FORMATS["minimax"].turn(f"Write {text}.")
    assert (turn.calls, turn.content, turn.malformed) == ((), f"Write {text}.", ())
    turn = FORMATS["minimax"].turn(f"So.\n<minimax:tool_call>\n{text}\n{text}", declared=DECLARED)
    assert (turn.calls, turn.content) == ((ReadCall("bash", ARGUMENTS),) * 2, "So.")


@pytest.mark.parametrize(
    "prose", ["I look.", "I look:", 'So "x":', "1. First\n\n", "```\nls\n```", "I call `bash`:\n"]
)
def test_a_llama_call_may_follow_prose(prose: str) -> None:
    one = f'{{"name": "bash", "parameters": {JSON}}}'
    for call in (
        one,
        f"[{one}]",
        f"<|python_tag|>{one}",
        one.replace('"name"', '"type": "function", "name"'),
    ):
        turn = FORMATS["llama"].turn(f"{prose}\n{call}")
        quoted = prose == 'So "x":' and "<|" not in call
        assert turn.calls == ((ReadCall("bash", ARGUMENTS),) * (not quoted)), call
        assert turn.content == (f"{prose}\n{call}" if quoted else prose.strip())
    turn = FORMATS["llama"].turn(f"{prose}\n{one}\nThen the next:\n{one}\nDone.")
    assert len(turn.calls) == 2 or prose == 'So "x":'
    assert turn.content.endswith("Done.")
    broken = FORMATS["llama"].turn(f"I look.\n{one[:-1]}")
    assert (broken.calls, len(broken.malformed)) == ((), 1)


@pytest.mark.parametrize(
    "answer",
    [
        'The call is {"name": "bash", "parameters": {}}',
        '```json\n{"name": "bash", "parameters": {}}\n```',
        '```\n{"name": "bash", "parameters": {}}\n```',
        '```\nAn example:\n{"name": "bash", "parameters": {}}\n```',
        '{"calls": [\n{"name": "bash", "parameters": {}}\n]}',
        '{"call":\n{"name": "bash", "parameters": {}}\n}',
        'calls = [\n    {"name": "a", "parameters": {}},\n    {"name": "b", "parameters": {}}]',
        'People:\n{"name": "Ada", "born": 1815}',
        'Tools:\n{"name": "bash", "description": "Run.", "parameters": {"type": "object"}}',
    ],
)
def test_quoted_json_is_no_llama_call(answer: str) -> None:
    turn = FORMATS["llama"].turn(answer)
    assert (turn.calls, turn.content, turn.malformed) == ((), answer, ())


@pytest.mark.parametrize("to", ["assistant", "user", "all"])
def test_a_harmony_message_to_everyone_is_content(to: str) -> None:
    said = f"<|channel|>commentary to={to}<|message|>The plan.<|end|><|start|>assistant"
    turn = FORMATS["harmony"].turn(f"{said}<|channel|>commentary to=functions.{to}<|message|>{JSON}<|call|>")
    assert (turn.content, turn.calls, turn.malformed) == ("The plan.", (ReadCall(to, ARGUMENTS),), ())
    turn = FORMATS["harmony"].turn(f"<|channel|>commentary to={to}_tool<|message|>{JSON}<|call|>")
    assert turn.calls == (ReadCall(f"{to}_tool", ARGUMENTS),)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('"url":"https://a.b/?c=1","n":2', {"url": "https://a.b/?c=1", "n": 2}),
        ('command:"ls -la \\"a\\""', {"command": 'ls -la "a"'}),
        ('refs:[\'a\', "b",<|"|>c<|"|>]', {"refs": ["a", "b", "c"]}),
        ('opts:{"mode": "fast", \'n\': None}', {"opts": {"mode": "fast", "n": None}}),
        ("save_as='a b.docx', n=3", {"save_as": "a b.docx", "n": 3}),
        ('code:<|"|>x="a" \'b\'<|"|>,refs=["a=b:c"]', {"code": "x=\"a\" 'b'", "refs": ["a=b:c"]}),
        ("a:True,b:False,c:'True'", {"a": True, "b": False, "c": "True"}),
        ("\"a\" = '\n'", {"a": "\n"}),
    ],
)
def test_gemmas_texts_may_have_other_quotes(written: str, arguments: Any) -> None:
    turn = FORMATS["gemma"].turn(f"<|tool_call>call:bash{{{written}}}<tool_call|>")
    assert (turn.calls, turn.content, turn.malformed) == ((ReadCall("bash", arguments),), "", ())


@pytest.mark.parametrize(
    "written", ['command:"ls', "command:'ls", 'command:"ls" -la', "'command'ls", 'command:"\\d"']
)
def test_a_gemma_call_with_an_unreadable_text_does_not_swallow_the_next(written: str) -> None:
    following = "<|tool_call>call:bash{n:\"3\",m:'4'}<tool_call|>"
    turn = FORMATS["gemma"].turn(f"<|tool_call>call:bash{{{written}}}<tool_call|>{following}")
    assert (turn.calls, len(turn.malformed)) == ((ReadCall("bash", {"n": "3", "m": "4"}),), 1)


@pytest.mark.parametrize("text", ["'", "\\'", '"', "True "])
def test_python_literals_are_read_in_linear_time(text: str) -> None:
    for end in ("", "'", '"'):
        written = f"['{text * 100_000}{end}"
        assert DECLARED.value("bash", "paths", written) == written


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
    "functiongemma": "<start_function_call>call:bash{x:",
    "llama": '{"name": "bash", "parameters": ',
    "pythonic": "[bash(x=",
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
