"""The pythonic format: a list of calls in the syntax of Python. Llama 3.2 and Llama 4, ToolACE.

[bash(command="ls", count=3), plan(steps=["a", "b"])]

Values are literals. They are converted to JSON, never evaluated. Llama 4 writes some calls in JSON (`Llama`).
"""

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from prorl_envs.model.tool_formats.marked import Llama
from prorl_envs.model.tool_formats.reading import (
    Declared,
    Malformed,
    ReadCall,
    ToolFormat,
    checked,
    decode,
    marks_in_prose,
    skip_space,
)
from prorl_envs.tools.types import JsonObject

_NAME = re.compile(r"\s*([A-Za-z_][\w.]{0,199})\s*\(")
_KEY = re.compile(r"\s*([^\W\d]\w{0,199})\s*=(?!=)\s*")
_CALLS = r"\[\s*[A-Za-z_][\w.]{0,199}\s*\(\s*(?:\)|[^\W\d]\w{0,199}\s*=(?!=))"
_LIST = re.compile(rf"(?:<\|python_start\|>\s*)?{_CALLS}")
_BEGIN = re.compile(rf"\s*(?={_LIST.pattern})")
#: What matters in prose: a fence of a code block, and a list of calls at the start of a line.
_IN_PROSE = re.compile(rf"(?P<fence>```)|(?<=[^\s\[{{,=])\s*\n[ \t]*(?={_LIST.pattern})")
_NEXT = re.compile(rf"\n[ \t]*(?={_LIST.pattern})")
_TEXT = (
    r"\"\"\"(?:[^\"\\]|\\.|\"(?!\"\"))*+\"\"\"|'''(?:[^'\\]|\\.|'(?!''))*+'''"
    r"|\"(?:[^\"\\\n]|\\.)*+\"(?!\")|'(?:[^'\\\n]|\\.)*+'(?!')"
)
#: A part of a value: a complete text, an opening or closing bracket, a comma, or other text.
_PART = re.compile(rf"{_TEXT}|(?P<open>[\[{{])|(?P<close>[\])}}])|(?P<comma>,)|[^\[\]{{}}(),\"']+", re.DOTALL)
_TOKEN = re.compile(rf"(?P<text>{_TEXT})|\b(?:True|False|None)\b", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:[xuU](?P<hex>(?<=x)[\da-fA-F]{2}|(?<=u)[\da-fA-F]{4}|(?<=U)[\da-fA-F]{8})|(?P<octal>[0-7]{1,3})|(?P<other>.))",
    re.DOTALL,
)
_ESCAPES = {"\n": "", "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_ESCAPES |= {character: character for character in "\"'\\"}
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_AFTER = re.compile(r"[ \t]*(?=<\||\n|\Z)")

_JSON = Llama()


class Pythonic(ToolFormat):
    name = "pythonic"
    form = 'Answer with [NAME(KEY="TEXT", KEY=3)] and nothing else.'
    _START = "<|python_start|>"
    noise = (_START, "<|python_end|>")

    def find(self, text: str, at: int) -> int:
        found = self._find_list(text, at), _JSON.find(text, at)
        return min((position for position in found if position >= 0), default=-1)

    def _find_list(self, text: str, at: int) -> int:
        if begin := _BEGIN.match(text, at):
            return begin.end()
        marks = marks_in_prose(_IN_PROSE, text, at)
        return next((mark.end() for mark, fenced in marks if not fenced), -1)

    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        if not _LIST.match(text, at):
            return _JSON.read(text, at, declared)
        at = skip_space(text, at + len(self._START) * text.startswith(self._START, at)) + len("[")
        calls: list[ReadCall] = []
        while not calls or text.startswith(",", at):
            call, at = _call(text, at + bool(calls), declared)
            calls.append(call)
            at = skip_space(text, at)
        end = _AFTER.match(text, at + 1)
        if not text.startswith("]", at) or not end:
            raise Malformed("A list of calls was cut off, or there is text after a call.")
        return calls, end.end()

    def resume(self, text: str, at: int) -> int:
        if not _LIST.match(text, at):
            return _JSON.resume(text, at)
        following = _NEXT.search(text, at + 1)
        # A list after an opening of a long text may be part of that text.
        start = following.end() if following else len(text)
        long = any(text.find(quotes, at, start) >= 0 for quotes in ('"""', "'''"))
        return len(text) if long else start


def _call(text: str, at: int, declared: Declared) -> tuple[ReadCall, int]:
    """Parse the call at `at`. Return it and its end."""
    if (name := _NAME.match(text, at)) is None:
        raise Malformed("A list of calls has an element that is no call.")
    arguments: JsonObject = {}
    at = skip_space(text, name.end())
    while not text.startswith(")", at):
        if (key := _KEY.match(text, at)) is None:
            raise Malformed(f"The call to {name[1][:40]!a} was cut off, or has an argument without a name.")
        if key[1] in arguments:
            raise Malformed(f"A tool call has the parameter {key[1][:40]!a} twice.")
        end = _end_of_value(text, key.end())
        arguments[key[1]] = _value(text[key.end() : end], name[1], key[1], declared)
        at = skip_space(text, end + text.startswith(",", end))
    return checked(name[1], arguments), at + 1


def _end_of_value(text: str, at: int) -> int:
    """Return the position of the comma or parenthesis after the value at `at`."""
    depth = 0
    while part := _PART.match(text, at):
        if depth == 0 and (part["comma"] or part[0] == ")"):
            return at
        if part["open"]:
            depth += 1
        elif part["close"]:
            depth -= 1
        if depth < 0:
            break
        at = part.end()
    raise Malformed("A tool call was cut off within a value, or has a value that is no literal.")


def _value(literal: str, tool: str, key: str, declared: Declared) -> Any:
    value = decode(_TOKEN.sub(_in_json, literal.strip()))
    return declared.quoted(tool, key, value) if isinstance(value, str) else value


def _in_json(token: re.Match[str]) -> str:
    """Return a constant or text of Python as JSON."""
    if not token["text"]:
        return _CONSTANTS[token[0]]
    width = 3 if token[0].startswith(('"""', "'''")) else 1
    return json.dumps(_ESCAPE.sub(_unescaped, token[0][width:-width]))


def _unescaped(escape: re.Match[str]) -> str:
    if escape["other"]:
        return _ESCAPES.get(escape["other"], escape[0])
    code = int(escape["hex"], 16) if escape["hex"] else int(escape["octal"], 8)
    return chr(code) if code <= sys.maxunicode else escape[0]
