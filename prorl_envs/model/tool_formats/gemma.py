"""The format of Gemma 4 and FunctionGemma: a notation similar to JSON, with strings between quote tokens.

<|tool_call>call:bash{command:<|"|>ls<|"|>,count:3}<tool_call|>
<start_function_call>call:bash{command:<escape>ls<escape>,count:3}<end_function_call>
"""

import re
from collections.abc import Sequence
from typing import Any

from prorl_envs.model.tool_formats.reading import (
    MAX_NAME,
    Declared,
    Malformed,
    ReadCall,
    ToolFormat,
    checked,
    decode,
    end_of,
    in_json,
    resume_behind,
    skip_space,
    up_to,
)
from prorl_envs.tools.types import JsonObject

_MAX_DEPTH = 64
#: Quotes that some answers have in place of the quote token, and the equals sign in place of the colon.
_PLAIN_QUOTES = ('"', "'")
_PLAIN_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*+\"|'(?:[^'\\]|\\.)*+'", re.DOTALL)
_AFTER_KEY = re.compile("[:=]")
_BARE = re.compile(r"[^\s,{}\[\]<>]{1,400}")


class Gemma(ToolFormat):
    name = "gemma"
    _OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'

    def __init__(self) -> None:
        self.form = f"Write {self._OPEN}call:NAME{{KEY:{self._QUOTE}TEXT{self._QUOTE},KEY:3}}{self._CLOSE}."
        self._tags = re.compile(rf"{re.escape(self._OPEN)}\s*call:|{re.escape(self._CLOSE)}")

    def find(self, text: str, at: int) -> int:
        return text.find(self._OPEN, at)

    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        at = skip_space(text, at + len(self._OPEN))
        if not text.startswith("call:", at):
            raise Malformed("A tool call does not begin with call:NAME.")
        name, brace = up_to(text, at + len("call:"), "{", "The name of a tool call")
        arguments, end = self._object(text, brace, 0)
        return [checked(name, arguments)], end_of(text, end, self._CLOSE, preceding="the arguments")

    def resume(self, text: str, at: int) -> int:
        return resume_behind(text, at, self._OPEN, self._CLOSE)

    def _object(self, text: str, at: int, depth: int) -> tuple[JsonObject, int]:
        """Parse the object whose opening brace is just before `at`. Return it and its end."""
        found: JsonObject = {}
        while not text.startswith("}", at := skip_space(text, at)):
            if text.startswith((self._QUOTE, *_PLAIN_QUOTES), at):
                quoted = text.startswith(self._QUOTE, at)
                key, at = self._string(text, at) if quoted else self._plain_string(text, at)
                mark = "=" if text.startswith("=", skip_space(text, at)) else ":"
                at = end_of(text, at, mark, preceding="a key")
            else:
                found_mark = _AFTER_KEY.search(text, at, at + MAX_NAME)
                key, at = up_to(text, at, found_mark[0] if found_mark else ":", "A key of a tool call")
            found[key], at = self._value(text, at, depth + 1)
            at = _separator(text, at, "}")
        return found, at + 1

    def _list(self, text: str, at: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        while not text.startswith("]", at := skip_space(text, at)):
            value, at = self._value(text, at, depth + 1)
            found.append(value)
            at = _separator(text, at, "]")
        return found, at + 1

    def _value(self, text: str, at: int, depth: int) -> tuple[Any, int]:
        at = skip_space(text, at)
        if depth > _MAX_DEPTH:
            raise Malformed("The arguments of a tool call are nested too deeply.")
        if text.startswith(self._QUOTE, at):
            return self._string(text, at)
        if text.startswith("{", at):
            return self._object(text, at + 1, depth)
        if text.startswith("[", at):
            return self._list(text, at + 1, depth)
        if text.startswith(_PLAIN_QUOTES, at):
            return self._plain_string(text, at)
        bare = _BARE.match(text, at)
        if not bare:
            raise Malformed("A tool call was cut off, or has a value that cannot be read.")
        try:
            return decode(in_json(bare[0])), bare.end()
        except Malformed:
            return bare[0], bare.end()

    def _string(self, text: str, at: int) -> tuple[str, int]:
        start = at + len(self._QUOTE)
        found = text.find(self._QUOTE, start)
        if found < 0:
            raise Malformed("A tool call was cut off within a text.")
        if self._starts_call(text[start:found]):
            raise Malformed(
                f"A text of a tool call contains the start of another call, or lacks {self._QUOTE}."
            )
        return text[start:found], found + len(self._QUOTE)

    def _plain_string(self, text: str, at: int) -> tuple[str, int]:
        """Parse a text between quotes of JSON or Python."""
        quoted = _PLAIN_STRING.match(text, at)
        if not quoted:
            raise Malformed("A tool call was cut off within a text.")
        value = decode(in_json(quoted[0]))
        if self._starts_call(value):
            raise Malformed("A text of a tool call contains the start of another call, or lacks its quote.")
        return value, quoted.end()

    def _starts_call(self, value: str) -> bool:
        """Return true if a call starts in a text but does not end there: a closing quote is missing."""
        depth = 0
        for tag in self._tags.finditer(value):
            depth = max(depth - 1, 0) if tag[0] == self._CLOSE else depth + 1
        return depth > 0


class FunctionGemma(Gemma):
    name = "functiongemma"
    _OPEN, _CLOSE, _QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"


def _separator(text: str, at: int, close: str) -> int:
    """Return the position after the comma, or of the closing bracket."""
    at = skip_space(text, at)
    if text.startswith(",", at):
        return at + 1
    if not text.startswith(close, at):
        raise Malformed(f"A tool call was cut off, or lacks a comma or {close}.")
    return at
