"""Formats whose arguments are tags around plain values: the coder format, GLM's, and DeepSeek's DSML.

Values are not quoted, so their types come from the tools' schemas. A value may contain its own closing tag:
it ends at the first closing tag after which the call continues with valid syntax.
"""

import re
from collections.abc import Sequence

from prorl_envs.model.tool_formats.reading import (
    Declared,
    Malformed,
    ReadCall,
    ToolFormat,
    checked,
    decode,
    end_of,
    resume_behind,
    skip_space,
    up_to,
)
from prorl_envs.tools.types import JsonObject

_TOOL_CALL, _TOOL_CALL_END = "<tool_call>", "</tool_call>"


class Coder(ToolFormat):
    """Qwen 3 Coder, Qwen 3.5 and later, Nemotron 3.

    <tool_call>
    <function=bash>
    <parameter=command>
    ls
    </parameter>
    </function>
    </tool_call>
    """

    name = "coder"
    form = (
        "Write <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>."
    )

    def find(self, text: str, at: int) -> int:
        # The coder models sometimes omit the outer tag.
        found = [i for i in (text.find(_TOOL_CALL, at), text.find("<function=", at)) if i >= 0]
        return min(found, default=-1)

    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        tagged = text.startswith(_TOOL_CALL, at)
        at = skip_space(text, at + len(_TOOL_CALL) if tagged else at)
        if not text.startswith("<function=", at):
            raise Malformed("A tool call does not begin with <function=NAME>.")
        name, at = up_to(text, at + len("<function="), ">", "The name of a tool call")
        arguments: JsonObject = {}
        while text.startswith("<parameter=", at := skip_space(text, at)):
            key, at = up_to(text, at + len("<parameter="), ">", f"A parameter of {name!a}")
            value, at = _value(text, at, "</parameter>", ("<parameter=", "</function>", _TOOL_CALL_END))
            arguments[key] = declared.value(name, key, value.removeprefix("\n").removesuffix("\n"))
        if text.startswith("</function>", at):
            at += len("</function>")
        elif not text.startswith(_TOOL_CALL_END, at):
            raise Malformed(f"The call to {name!a} was cut off, or has text between its parameters.")
        call = checked(name, arguments)
        return [call], end_of(text, at, _TOOL_CALL_END, what="</function>") if tagged else at

    def resume(self, text: str, at: int) -> int:
        opening = _TOOL_CALL if text.startswith(_TOOL_CALL, at) else "<function="
        return resume_behind(text, at, opening, _TOOL_CALL_END)


class Glm(ToolFormat):
    """GLM 4.5 and later.

    <tool_call>bash
    <arg_key>command</arg_key>
    <arg_value>ls</arg_value>
    </tool_call>
    """

    name = "glm"
    form = "Write <tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>."
    _NAME = re.compile(r"\s*([^\s<>{}]+)")

    def find(self, text: str, at: int) -> int:
        return text.find(_TOOL_CALL, at)

    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        found = self._NAME.match(text, at + len(_TOOL_CALL))
        if not found:
            raise Malformed("A tool call does not begin with the tool's name.")
        name, at = found[1], found.end()
        arguments: JsonObject = {}
        while text.startswith("<arg_key>", at := skip_space(text, at)):
            key, at = up_to(text, at + len("<arg_key>"), "</arg_key>", f"A key of {name[:40]!a}")
            at = skip_space(text, at)
            if not text.startswith("<arg_value>", at):
                raise Malformed(f"The key {key!a} has no <arg_value>.")
            value, at = _value(text, at + len("<arg_value>"), "</arg_value>", ("<arg_key>", _TOOL_CALL_END))
            arguments[key] = declared.value(name, key, value)
        if not text.startswith(_TOOL_CALL_END, at):
            raise Malformed(f"The call to {name[:40]!a} was cut off, or has text between its arguments.")
        return [checked(name, arguments)], at + len(_TOOL_CALL_END)

    def resume(self, text: str, at: int) -> int:
        return resume_behind(text, at, _TOOL_CALL, _TOOL_CALL_END)


class Dsml(ToolFormat):
    """DeepSeek V3.2 and later.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="bash">
    <｜DSML｜parameter name="command" string="true">ls</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
    """

    name = "dsml"
    form = (
        'Write <｜DSML｜invoke name="NAME">\n<｜DSML｜parameter name="KEY" string="true">VALUE'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>."
    )
    noise = tuple(
        f"<{slash}｜DSML｜{block}>" for slash in ("", "/") for block in ("function_calls", "tool_calls")
    )
    _OPEN, _CLOSE = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
    _PARAMETER, _PARAMETER_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
    _KIND = re.compile(r'\s+string="(true|false)"\s*>|\s*>')

    def find(self, text: str, at: int) -> int:
        return text.find(self._OPEN, at)

    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        name, at = up_to(text, at + len(self._OPEN), '">', "The name of a tool call")
        arguments: JsonObject = {}
        while text.startswith(self._PARAMETER, at := skip_space(text, at)):
            key, at = up_to(text, at + len(self._PARAMETER), '"', f"A parameter of {name!a}")
            kind = self._KIND.match(text, at)
            if not kind:
                raise Malformed(f'The parameter {key!a} is not written as name="KEY" string="true">.')
            value, at = _value(text, kind.end(), self._PARAMETER_END, (self._PARAMETER, self._CLOSE))
            arguments[key] = decode(value) if kind[1] == "false" else value
        if not text.startswith(self._CLOSE, at):
            raise Malformed(f"The call to {name!a} was cut off, or has text between its parameters.")
        return [checked(name, arguments)], at + len(self._CLOSE)

    def resume(self, text: str, at: int) -> int:
        return resume_behind(text, at, self._OPEN, self._CLOSE)


def _value(text: str, start: int, close: str, after: tuple[str, ...]) -> tuple[str, int]:
    """Return a value as it is written, and the position after its closing tag."""
    found = text.find(close, start)
    while found >= 0:
        end = found + len(close)
        following = skip_space(text, end)
        if following == len(text) or text.startswith(after, following):
            return text[start:found], end
        found = text.find(close, end)
    raise Malformed(f"A tool call was cut off before {close}.")
