"""Damaged tool calls in every format: no call contains text of another, and intact calls are parsed."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_envs.model.tool_formats.choice import FORMATS
from prorl_envs.model.tool_formats.reading import Declared, ReadCall
from prorl_envs.tools.types import ToolSpec

PLAN = "<tool_call>\n<function=plan>\n<parameter=text>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM_PLAN = "<tool_call>plan\n<arg_key>text</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
DSML_PLAN = (
    '<｜DSML｜invoke name="plan">\n<｜DSML｜parameter name="text" string="true">{}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>"
)
MINIMAX_PLAN = (
    '<minimax:tool_call>\n<invoke name="plan">\n<parameter name="text">{}</parameter>\n</invoke>\n'
    "</minimax:tool_call>"
)
GEMMA_PLAN = '<|tool_call>call:plan{text:<|"|>{}<|"|>}<tool_call|>'
TAGGED = {
    "coder": (PLAN, "\n</parameter>"),
    "glm": (GLM_PLAN, "</arg_value>"),
    "dsml": (DSML_PLAN, "</｜DSML｜parameter>"),
    "minimax": (MINIMAX_PLAN, "</parameter>"),
}
PARAMETERS = dict(zip(TAGGED, ("<parameter", "<arg_key", "<｜DSML｜p", "<parameter"), strict=True))


def plan(text: str) -> ReadCall:
    return ReadCall("plan", {"text": text})


@pytest.mark.parametrize("name", TAGGED)
def test_a_call_without_a_closing_tag_does_not_swallow_the_next(name: str) -> None:
    written, close = TAGGED[name]
    for missing in (close, written.partition(close)[2], close + written.partition(close)[2]):
        first = written.replace("{}", "ls -la").replace(missing, "")
        turn = FORMATS[name].turn(f"{first}\n{written.replace('{}', 'pwd')}")
        assert (turn.calls, len(turn.malformed)) == ((plan("pwd"),), 1), missing


@pytest.mark.parametrize("name", TAGGED)
def test_a_parameter_without_a_closing_tag_does_not_swallow_the_next(name: str) -> None:
    written, close = TAGGED[name]
    start, _, end = written.replace("{}", "ls -la").partition(close)
    for line, value in (("\n", "x </parameter></arg_value> y"), ("", "x")):
        parameter = start[start.index(PARAMETERS[name]) :]
        second = parameter.replace("text", "more").replace("ls -la", value)
        turn = FORMATS[name].turn(f"{start}{line}{second}{close}{end}")
        assert (turn.calls, len(turn.malformed)) == ((), 1)


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_may_quote_whole_calls(name: str) -> None:
    written, _ = TAGGED[name]
    for value in (f"Example:\n{written.replace('{}', 'pwd')}\nand so on", written.replace("{}", "a")):
        assert FORMATS[name].turn(written.replace("{}", value)).calls == (plan(value),)


@pytest.mark.parametrize(
    "value",
    [
        "grep -rn '<tool_call>' .",
        "grep '<function=' f",
        "grep '<parameter=' f",
        "echo '</parameter>'; echo '</function>' '</tool_call>'",
        'echo "<parameter=x>1</parameter>"',
        "the tag <function=name> starts a call",
        "if a <b and c> d:\n\tpass",
    ],
)
def test_a_value_may_mention_tags(value: str) -> None:
    turn = FORMATS["coder"].turn(f"{PLAN.replace('{}', value)}\n{PLAN.replace('{}', 'pwd')}")
    assert turn.calls == (plan(value), plan("pwd"))


def test_the_end_of_a_call_before_another_is_no_quotation() -> None:
    first = PLAN.replace("{}", "ls").replace("\n</parameter>", "")
    last = "pwd\n</parameter>\n</function>\n</tool_call>"  # of a call whose start is missing
    turn = FORMATS["coder"].turn(f"{first}\n{PLAN.replace('{}', 'a')}\n{last}")
    assert (turn.calls, len(turn.malformed)) == ((plan("a"),), 1)


def test_a_quoted_call_must_be_closed() -> None:
    for name, (written, close) in TAGGED.items():
        quoted = written.replace("{}", "a").replace(close, "")
        turn = FORMATS[name].turn(written.replace("{}", quoted))
        assert turn.malformed
        assert all("plan" not in json.dumps(call.arguments) for call in turn.calls)


def test_a_text_without_a_closing_quote_does_not_swallow_the_next_call() -> None:
    first = GEMMA_PLAN.replace("{}", "ls").replace('ls<|"|>', "ls")
    for text in ("", "}", ",text:3}", "},"):
        turn = FORMATS["gemma"].turn(f"{first}{GEMMA_PLAN.replace('{}', text)}")
        assert turn.calls == ((plan(text),) if text else (plan(""),))
        assert len(turn.malformed) == 1
    mention = "write <|tool_call> here, or <|tool_call>call:x{}<tool_call|>"
    assert FORMATS["gemma"].turn(GEMMA_PLAN.replace("{}", mention)).calls == (plan(mention),)


@pytest.mark.parametrize("name", TAGGED)
def test_quotations_are_bounded(name: str) -> None:
    for depth, read in ((30, True), (70, False)):
        value = "a"
        for _ in range(depth):
            value = TAGGED[name][0].replace("{}", value)
        turn = FORMATS[name].turn(TAGGED[name][0].replace("{}", value))
        assert (turn.calls == (plan(value),)) is read
        assert bool(turn.malformed) is not read


@pytest.mark.parametrize("name", TAGGED)
def test_a_repeated_parameter_is_malformed(name: str) -> None:
    written, close = TAGGED[name]
    start, _, end = written.replace("{}", "ls").partition(close)
    parameter = start[start.index(PARAMETERS[name]) :]
    turn = FORMATS[name].turn(f"{start}{close}\n{parameter}{close}{end}")
    assert turn.calls == ()
    assert "twice" in turn.malformed[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "llama",
            '{"name": "bash", "parameters": {"command": "ls}; {"name": "plan", "parameters": {"text": "a"}}',
        ),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>function\n<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>plan<｜tool▁sep｜>"
            '{"text": "a"}<｜tool▁call▁end｜>',
        ),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>plan\n"
            '```json\n{"text": "a"}\n```<｜tool▁call▁end｜>',
        ),
        (
            "kimi",
            "<|tool_call_begin|>functions.bash:0<|tool_call_begin|>functions.plan:1<|tool_call_argument_begin|>"
            '{"text": "a"}<|tool_call_end|>',
        ),
        ("coder", f"<tool_call>\n<function=bash\n{PLAN.replace('{}', 'a')}"),
        ("coder", f"<tool_call>\n<function=bash>\n<parameter=command\n{PLAN.replace('{}', 'a')}"),
        ("coder", PLAN.replace("{}", "b").replace("\n</parameter>", "") + PLAN.replace("{}", "a")[12:]),
        ("glm", f"<tool_call>bash\n<arg_key>command\n{GLM_PLAN.replace('{}', 'a')}"),
        ("dsml", f'<｜DSML｜invoke name="bash\n{DSML_PLAN.replace("{}", "a")}'),
        (
            "minimax",
            f"<minimax:tool_call>\n<invoke name='bash'>\n</invoke>\n{MINIMAX_PLAN.replace('{}', 'a')}",
        ),
        (
            "minimax",
            f'<minimax:tool_call>{{"name": "bash"}}</minimax:tool_call>\n{MINIMAX_PLAN.replace("{}", "a")}',
        ),
        ("minimax", f'<minimax:tool_call>\n<invoke name="bash\n{MINIMAX_PLAN.replace("{}", "a")}'),
        ("gemma", f"<|tool_call>call:bash{GEMMA_PLAN.replace('{}', 'a')}"),
        (
            "harmony",
            '<|channel|>commentary to=functions.bash <|constrain|>json{"command": "ls"}<|call|><|start|>'
            'assistant<|channel|>commentary to=functions.plan <|constrain|>json<|message|>{"text": "a"}',
        ),
    ],
)
def test_an_unreadable_call_does_not_hide_the_next(name: str, text: str) -> None:
    turn = FORMATS[name].turn(text)
    assert (turn.calls, len(turn.malformed)) == ((plan("a"),), 1)


def test_a_harmony_call_without_its_message_token_is_reported() -> None:
    turn = FORMATS["harmony"].turn('<|channel|>commentary to=functions.plan <|constrain|>json{"text": "a"}')
    assert (turn.calls, len(turn.malformed)) == ((), 1)
    unfinished = (
        "<|channel|>analysis<|message|>I look.<|channel|>commentary to=functions.plan<|message|>{}<|call|>"
    )
    turn = FORMATS["harmony"].turn(unfinished)
    assert (turn.calls, turn.reasoning) == ((ReadCall("plan", {}),), "I look.")
    assert FORMATS["harmony"].turn("I reply to=Ada.").malformed == ()


def test_calls_in_json_strings_stay_text() -> None:
    inner = PLAN.replace("{}", "rm")
    for name, text in [
        (
            "hermes",
            f"<tool_call>\n{json.dumps({'name': 'plan', 'arguments': {'text': inner}})}\n</tool_call>",
        ),
        ("coder", f"<tool_call>\n{json.dumps({'name': 'plan', 'arguments': {'text': inner}})}\n</tool_call>"),
    ]:
        turn = FORMATS[name].turn(text)
        assert turn.calls == ((plan(inner),) if name == "hermes" else ())


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "9" * 5_000])
def test_a_number_beyond_the_range_is_malformed(number: str) -> None:
    turn = FORMATS["hermes"].turn(
        f'<tool_call>{{"name": "plan", "arguments": {{"n": {number}}}}}</tool_call>'
    )
    assert (turn.calls, len(turn.malformed)) == ((), 1)
    declared = Declared.of([ToolSpec("plan", "", {"properties": {"text": {"type": "number"}}})])
    assert FORMATS["coder"].turn(PLAN.replace("{}", number), declared=declared).calls == (plan(number),)


# Property: damage to calls never mixes two of them.


def _json(arguments: dict[str, str]) -> list[str]:
    pieces = ["{"]
    for key, value in arguments.items():
        pieces += ["" if len(pieces) == 1 else ", ", json.dumps(key), ": ", '"', json.dumps(value)[1:-1], '"']
    return [*pieces, "}"]


def _tags(start: list[str], parameter: Callable[[str, str], list[str]], end: list[str]) -> "Pieces":
    return lambda arguments: [
        *start,
        *(piece for pair in arguments.items() for piece in parameter(*pair)),
        *end,
    ]


type Pieces = Callable[[dict[str, str]], list[str]]


#: The syntactic pieces of a call, of which any may be missing.
def _gemma(start: str, quote: str, end: str) -> Callable[[dict[str, str]], list[str]]:
    return lambda a: [
        *(start, "call:", "f", "{"),
        *(p for n, (k, v) in enumerate(a.items()) for p in ("," * (n > 0), k, ":", quote, v, quote)),
        *("}", end),
    ]


WRITERS: dict[str, Pieces] = {
    "hermes": lambda a: [
        "<tool_call>", "\n", '{"name": "f", "arguments": ', *_json(a), "}", "\n", "</tool_call>",
    ],
    "coder": _tags(
        ["<tool_call>", "\n", "<function=", "f", ">", "\n"],
        lambda k, v: ["<parameter=", k, ">", f"\n{v}\n", "</parameter>", "\n"],
        ["</function>", "\n", "</tool_call>"],
    ),
    "glm": _tags(
        ["<tool_call>", "f", "\n"],
        lambda k, v: ["<arg_key>", k, "</arg_key>", "\n", "<arg_value>", v, "</arg_value>", "\n"],
        ["</tool_call>"],
    ),
    "dsml": _tags(
        ["<｜DSML｜invoke", ' name="', "f", '">', "\n"],
        lambda k, v: [
            "<｜DSML｜parameter", f' name="{k}"', ' string="true">', v, "</｜DSML｜parameter>", "\n",
        ],
        ["</｜DSML｜invoke>"],
    ),
    "minimax": _tags(
        ["<minimax:tool_call>", "\n", '<invoke name="f">', "\n"],
        lambda k, v: ["<parameter", f' name="{k}"', ">", v, "</parameter>", "\n"],
        ["</invoke>", "\n", "</minimax:tool_call>"],
    ),
    "deepseek": lambda a: [
        "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "f", "\n```json\n", *_json(a), "\n```",
        "<｜tool▁call▁end｜>",
    ],
    "kimi": lambda a: [
        "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", *_json(a),
        "<|tool_call_end|>",
    ],
    "mistral": lambda a: ["[TOOL_CALLS]", "f", "[ARGS]", *_json(a)],
    "gemma": _gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "functiongemma": _gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    "harmony": lambda a: [
        "<|start|>", "assistant", "<|channel|>", "commentary", " to=functions.f", "<|message|>", *_json(a),
        "<|call|>",
    ],
    "pythonic": lambda a: [
        "[f(", *(p for k, v in a.items() for p in (k, "=", json.dumps(v), ",")), ")", "]",
    ],
    "llama": lambda a: ["{", '"name": "f", "parameters": ', *_json(a), "}"],
}  # fmt: skip

SPICE = ["", "", "\n", "<b>", '"', "}", "{", ",", "</x>", ": ", "text"]


@dataclass(frozen=True)
class Written:
    text: str
    arguments: dict[str, str]
    intact: bool


@st.composite
def turns(draw: st.DrawFn, name: str) -> list[Written]:
    """Return two to four calls, one or two of which lack a piece or end early. (An answer that does not start
    with a call has none in the Llama format.)"""
    count = draw(st.integers(2, 4))
    damaged = draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2))
    made = []
    for number in range(count):
        keys = draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=2, unique=True))
        spice = st.sampled_from(SPICE)
        arguments = {key: f"{draw(spice)}mark{number}{draw(spice)}" for key in keys}
        pieces = WRITERS[name](arguments)
        if number in damaged:
            place = draw(st.integers(2 if name == "llama" else 1, len(pieces) - 1))
            longer = pieces[place] + "".join(pieces[place + 1 :]) * draw(st.booleans())
            kept = draw(st.integers(0, max(len(pieces[place]) - 1, 0)))
            dropped = len(longer) - len(pieces[place])
            pieces = [*pieces[:place], pieces[place][:kept], *([] if dropped else pieces[place + 1 :])]
        made.append(Written("".join(pieces), arguments, number not in damaged))
    return made


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=250, derandomize=True)
def test_no_call_is_made_of_two(name: str, data: st.DataObject) -> None:
    written = data.draw(turns(name))
    turn = FORMATS[name].turn(("; " if name == "llama" else "\n").join(each.text for each in written))
    for call in turn.calls:
        marks = {n for n in range(len(written)) if f"mark{n}" in json.dumps(call.arguments)}
        assert len(marks) <= 1, call
    read = [call.arguments for call in turn.calls]
    assert all(each.arguments in read for each in written if each.intact)
