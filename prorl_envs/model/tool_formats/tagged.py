"""Formats whose arguments are tags around plain values: coder, GLM, DeepSeek's DSML, MiniMax.

Values are not quoted, so their types come from the tools' schemas. A value may contain its own closing tag:
it ends at the first closing tag after which the call continues with valid syntax. A value may also contain
whole calls, for example in a text about tool calls. If a call or parameter starts in a value but does not end
there, the call is malformed: probably the value's closing tag is missing, so it would include the next call.
"""

import re
from collections.abc import Sequence
from typing import Any

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
#: Maximum quoted tags that are open at once. It bounds the time for an answer with many unclosed calls.
_MAX_DEPTH = 64
#: The rest of the tag of a DSML parameter, which may name its type.
_KIND = re.compile(r'\s+string="(true|false)"\s*>|\s*>')


class _Tagged(ToolFormat):
    """A format with tagged parameters.

    Class attributes:
        tags: matches a tag. Its groups `call` and `end` are the start and the end of a call; `parameter` and
            `close` those of a parameter.
        following: matches the text that continues a call after a parameter.
    """

    tags: re.Pattern[str]
    following: re.Pattern[str]

    def resume(self, text: str, at: int) -> int:
        start = self.tags.match(text, at)
        if not start:  # not even the call's start is valid
            opening = next(each for each in (_TOOL_CALL, "<") if text.startswith(each, at))
            return resume_behind(text, at, opening, _TOOL_CALL_END)
        for tag in self.tags.finditer(text, start.end()):
            if tag.lastgroup == "call":
                return tag.start()
            if tag.lastgroup == "end":
                return tag.end()
        return len(text)

    def value(self, text: str, start: int, name: str) -> tuple[str, int]:
        """Return a value as it is written, and the position after its closing tag.

        Args:
            text: the turn.
            start: position after the value's opening tag.
            name: name of the call.

        Raises:
            Malformed: the closing tag is missing.
        """
        quoted: list[str] = []  # calls and parameters that the value quotes, and that are still open
        stray = start  # end of the last closing tag that closes nothing in the value
        for tag in self.tags.finditer(text, start):
            kind, inner = tag.lastgroup, quoted[-1:]
            if kind == "call":
                if stray > start and not inner and skip_space(text, stray) == tag.start():
                    break  # one call ends and the next starts
                quoted.append("call")
            elif kind == "parameter":
                # In the middle of a line, the tag is a quotation, which ends at any closing tag.
                own_line = text[tag.start() - 1] == "\n" or tag.start() == start
                quoted.append("parameter" if inner or own_line else "inline")
            elif (kind == "end" and inner == ["call"]) or (kind == "close" and inner == ["inline"]):
                quoted.pop()
            elif kind == "close" and inner != ["call"] and self.following.match(text, tag.end()):
                if not quoted:
                    return text[start : tag.start()], tag.end()
                quoted.pop()
            elif not inner:
                stray = tag.end()
            if len(quoted) > _MAX_DEPTH:
                break
        raise Malformed(f"The call to {name[:40]!a} lacks a closing tag before the next one, or was cut off.")


class Coder(_Tagged):
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
    tags = re.compile(
        r"(?P<call><tool_call>\s*<function=|<function=[^<>\n]{1,200}>\s*(?=<parameter=|</function>|</tool_call>))"
        r"|(?P<end></function>(?:\s*</tool_call>)?|</tool_call>)"
        r"|(?P<parameter><parameter=[^<>\n]{1,200}>)|(?P<close></parameter>)"
    )
    following = re.compile(r"\s*(?:<parameter=|</function>|</tool_call>|\Z)")

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
            value, at = self.value(text, at, name)
            _add(arguments, key, declared.value(name, key, value.removeprefix("\n").removesuffix("\n")))
        if text.startswith("</function>", at):
            at += len("</function>")
        elif not text.startswith(_TOOL_CALL_END, at):
            raise Malformed(f"The call to {name!a} was cut off, or has text between its parameters.")
        call = checked(name, arguments)
        return [call], end_of(text, at, _TOOL_CALL_END, preceding="</function>") if tagged else at


class Glm(_Tagged):
    """GLM 4.5 and later.

    <tool_call>bash
    <arg_key>command</arg_key>
    <arg_value>ls</arg_value>
    </tool_call>
    """

    name = "glm"
    form = "Write <tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>."
    tags = re.compile(
        r"(?P<call><tool_call>\s*[^\s<>{}]+\s*(?=<arg_key>|</tool_call>))|(?P<end></tool_call>)"
        r"|(?P<parameter><arg_key>(?:[^<]{0,200}</arg_key>\s*<arg_value>)?|<arg_value>)"
        r"|(?P<close></arg_value>)"
    )
    following = re.compile(r"\s*(?:<arg_key>|</tool_call>|\Z)")
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
            value, at = self.value(text, at + len("<arg_value>"), name)
            _add(arguments, key, declared.value(name, key, value))
        if not text.startswith(_TOOL_CALL_END, at):
            raise Malformed(f"The call to {name[:40]!a} was cut off, or has text between its arguments.")
        return [checked(name, arguments)], at + len(_TOOL_CALL_END)


class _Invoke(_Tagged):
    """A format with `invoke` and `parameter` tags inside a block.

    Args:
        prefix: text before the names of the tags.
        blocks: names of the tags around all calls.
    """

    def __init__(self, prefix: str, blocks: Sequence[str]) -> None:
        self.noise = tuple(f"<{slash}{block}>" for block in blocks for slash in ("", "/"))
        self._open, self._close = f'<{prefix}invoke name="', f"</{prefix}invoke>"
        self._parameter, close = f'<{prefix}parameter name="', f"</{prefix}parameter>"
        self.tags = re.compile(
            f"(?P<call>{self._open})|(?P<end>{self._close})|(?P<parameter>{self._parameter})|(?P<close>{close})"
        )
        self.following = re.compile(rf"\s*(?:{self._parameter}|{self._close}|\Z)")
        starts, ends = ("|".join(self.noise[half::2]) for half in (0, 1))
        #: The start of a call, or of a block with other text.
        self._begin = re.compile(rf"{self._open}|(?:{starts})(?!\s*(?:{self._open}|{ends}|\Z))")

    def find(self, text: str, at: int) -> int:
        found = self._begin.search(text, at)
        return found.start() if found else -1

    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        if not text.startswith(self._open, at):
            raise Malformed(f"A tool call does not begin with {self._open}.")
        name, at = up_to(text, at + len(self._open), '">', "The name of a tool call")
        arguments: JsonObject = {}
        while text.startswith(self._parameter, at := skip_space(text, at)):
            key, at = up_to(text, at + len(self._parameter), '"', f"A parameter of {name!a}")
            kind = _KIND.match(text, at)
            if not kind:
                raise Malformed(f"The parameter {key!a} is not written as in the format.")
            value, at = self.value(text, kind.end(), name)
            _add(arguments, key, _of_kind(kind[1], value, declared, name, key))
        if not text.startswith(self._close, at):
            raise Malformed(f"The call to {name!a} was cut off, or has text between its parameters.")
        return [checked(name, arguments)], at + len(self._close)


class Dsml(_Invoke):
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

    def __init__(self) -> None:
        super().__init__("｜DSML｜", ("｜DSML｜function_calls", "｜DSML｜tool_calls"))


class MiniMax(_Invoke):
    """MiniMax M2 and later.

    <minimax:tool_call>
    <invoke name="bash">
    <parameter name="command">ls</parameter>
    </invoke>
    </minimax:tool_call>
    """

    name = "minimax"
    form = (
        'Write <minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n'
        "</invoke>\n</minimax:tool_call>."
    )

    def __init__(self) -> None:
        super().__init__("", ("minimax:tool_call",))

    def find(self, text: str, at: int) -> int:
        block = text.find(self.noise[0])
        return super().find(text, max(at, block)) if block >= 0 else -1


def _of_kind(string: str | None, value: str, declared: Declared, name: str, key: str) -> Any:
    """Return a DSML value with the type that its attribute `string` names."""
    match string:
        case "true":
            return value
        case "false":
            return decode(value)
        case _:
            return declared.value(name, key, value)


def _add(arguments: JsonObject, key: str, value: Any) -> None:
    if key in arguments:
        raise Malformed(f"A tool call has the parameter {key!a} twice.")
    arguments[key] = value
