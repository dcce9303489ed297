"""The pythonic format: lists of calls with literals as values, perhaps after prose."""

import json
from typing import Any

import pytest

from prorl_envs.model.tool_formats.choice import FORMATS, TRIAL_TOOL, choose_format
from prorl_envs.model.tool_formats.reading import Declared, ReadCall

PYTHONIC = FORMATS["pythonic"]
F, G = ReadCall("f", {"a": 1}), ReadCall("g", {})


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'it\\'s'", "it's"),
        ('"it\'s"', "it's"),
        ("'say \"hi\"'", 'say "hi"'),
        ('""', ""),
        ("'''a 'b' \"c\"'''", "a 'b' \"c\""),
        ('"""\n[f(a=1)]\n"""', "\n[f(a=1)]\n"),
        ('"a, b) ] } c"', "a, b) ] } c"),
        (r'"\x41\u00e9\U0001F600\033[0m\d"', "A\u00e9\U0001f600\033[0m\\d"),
        ("True", True),
        ("false", False),
        ("None", None),
        ("-1.5e3", -1500.0),
        ("[1, 'a, True', {\"b\": None, 'c': [True]}]", [1, "a, True", {"b": None, "c": [True]}]),
        ("{}", {}),
    ],
)
def test_literals_are_values(literal: str, value: Any) -> None:
    (call,) = PYTHONIC.turn(f"[f(a={literal}, b=1)]").calls
    assert json.dumps(call.arguments) == json.dumps({"a": value, "b": 1})


@pytest.mark.parametrize(
    "value",
    [
        *("x", "f(1)", "1 + 1", "*x", "{1: 2}", "(1, 2)", "{1}", "[x]", "lambda: 1", "1e999", "", "not 1"),
        *("'a' 'b'", "f'{x}'", "b'a'", "'a\nb'", "'\\ud800'", "__import__('os').system('ls')"),
    ],
)
def test_other_expressions_are_reported(value: str) -> None:
    turn = PYTHONIC.turn(f"[f(a={value}, b=1)]")
    assert (turn.calls, len(turn.malformed)) == ((), 1)


@pytest.mark.parametrize("prose", ["", "So.", "```\nls\n```\nSo:"])
@pytest.mark.parametrize("text", ["[f(a=1), g()]", "[ f(a=1) ,\n g( ) ]", "[f(a=1)]\n[g()]"])
def test_several_calls_may_follow_prose(text: str, prose: str) -> None:
    for written in (text, f"<|python_start|>{text}<|python_end|>"):
        turn = PYTHONIC.turn(f"{prose}\n{written}\nDone.")
        assert (turn.calls, turn.malformed) == ((F, G), ())
        assert turn.content.split() == [*prose.split(), "Done."]


@pytest.mark.parametrize(
    "answer",
    [
        *("[1, 2, 3]", "[x for x in y]", "[f(x) for x in y]", "[f(a == 1)]", "f(a=1)", "[]"),
        *("The list is [f(a=1)].", "Use [f(a=1)] here", "[the page](https://a.b/?c=1)"),
        *("```python\n[f(a=1)]\n```", "calls = [\n[f(a=1)],\n]", "x =\n[f(a=1)]"),
    ],
)
def test_other_text_is_no_call(answer: str) -> None:
    turn = PYTHONIC.turn(answer)
    assert (turn.calls, turn.content, turn.malformed) == ((), answer, ())


@pytest.mark.parametrize(
    ("text", "following"),
    [
        ("[f(a=1), x]", True),
        ("[f(a=1, 2)]", True),
        ("[f(a=1, a=2)]", True),
        ("[f(a=1)", True),
        ("[f(a=1)][0]", True),
        ("[f(a=1) for x in y]", True),
        ('[f(a="ls), g(b="x")]', True),
        ("[f(a=1) g()]", True),
        # The rest may be part of a long text.
        ('[f(a="""\n[f(a=1)]\n""", 1)]', False),
        ('[f(a="""\n[f(a=1)]\n)]', False),
    ],
)
def test_a_broken_list_is_reported(text: str, following: bool) -> None:
    turn = PYTHONIC.turn(f"{text}\n[g()]")
    assert (turn.calls, len(turn.malformed)) == ((G,) if following else (), 1)


def test_calls_may_be_in_json() -> None:
    json_call = '{"name": "f", "parameters": {"a": 1}}'
    for text in (
        json_call,
        f"So.\n{json_call}",
        f"<|python_start|>{json_call}<|python_end|>",
        f"[{json_call}]",
    ):
        turn = PYTHONIC.turn(text)
        assert (turn.calls, turn.content, turn.malformed) == ((F,), "So." * text.startswith("So."), ())
    turn = PYTHONIC.turn(f"[f(a=1)]\n{json_call}\n[g()]")
    assert (turn.calls, turn.malformed) == ((F, F, G), ())
    quoted = f"\n{json_call}\n"
    assert PYTHONIC.turn(f'[f(a="""{quoted}""")]').calls == (ReadCall("f", {"a": quoted}),)
    assert PYTHONIC.turn('{"name": "Ada", "born": 1815}').malformed == ()


def test_quoted_values_get_their_declared_types() -> None:
    """Templates of Llama 4 quote all values."""
    text = '[trial_tool(value="text of the trial", number="3")]'
    assert choose_format("auto", text) is PYTHONIC
    (call,) = PYTHONIC.turn(text.replace("text of the trial", "3"), declared=Declared.of([TRIAL_TOOL])).calls
    assert call.arguments == {"value": "3", "number": 3}
    (call,) = PYTHONIC.turn('[f(a="[1]", b="2")]').calls
    assert call.arguments == {"a": "[1]", "b": "2"}


@pytest.mark.parametrize(
    "text",
    [
        *("[f(a=" * 60_000, "[f(a=[" + "[" * 300_000, '[f(a="' + "\\" * 300_001, "a\n[f(a=1" * 60_000),
        *("[f(a=" + '"""' * 100_001, "[f(a=" + "'" * 300_001, "[f(" + "a=1," * 90_000, "[f(a=1), " * 60_000),
        *(
            "[f(a=1)]\n" * 30_000 + "[f(",
            "a" + " \n" * 200_000,
            "[f(a=" + "-" * 300_000,
            "[f(a=1" + " " * 300_000,
        ),
    ],
    ids=range(12),
)
def test_hostile_text_is_read_in_linear_time(text: str) -> None:
    assert PYTHONIC.turn(text).malformed or not PYTHONIC.turn(text).calls
