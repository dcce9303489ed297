"""Formats with JSON between tags or after control tokens: Hermes, Llama, DeepSeek V3, Kimi, Mistral."""

import re
from collections.abc import Sequence
from typing import Any

from prorl_envs.model.tool_formats.reading import (
    Declared,
    Malformed,
    ReadCall,
    ToolFormat,
    call_of,
    checked,
    end_of,
    first_of,
    marks_in_prose,
    read_arguments,
    read_json,
    read_object,
    resume_behind,
    skip_space,
    up_to,
)


class Hermes(ToolFormat):
    """Qwen 2.5, Qwen 3, Hermes, and most models fine-tuned for tools.

    <tool_call>
    {"name": "bash", "arguments": {"command": "ls"}}
    </tool_call>
    """

    name = "hermes"
    form = 'Write <tool_call>{"name": ..., "arguments": {...}}</tool_call> with valid JSON.'
    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def find(self, text: str, at: int) -> int:
        return text.find(self._OPEN, at)

    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        value, end = read_object(text, at + len(self._OPEN))
        return [call_of(value)], end_of(text, end, self._CLOSE)

    def resume(self, text: str, at: int) -> int:
        return resume_behind(text, at, self._OPEN, self._CLOSE)


class Llama(ToolFormat):
    """Llama 3.1 and later: the whole answer is the call, or a list of calls.

    {"name": "bash", "parameters": {"command": "ls"}}

    Llama 4 may put it between <|python_start|> and <|python_end|>. Some answers start with prose. After it, a
    call starts a line, outside other JSON and blocks of code.
    """

    name = "llama"
    form = 'Answer with {"name": ..., "parameters": {...}} and nothing else.'
    noise = ("<|python_end|>",)
    _TAG = re.compile(r"<\|python_(?:tag|start)\|>")
    _BEGIN = re.compile(
        r'[\s;,]*(?:<\|python_(?:tag|start)\|>\s*)?(?=(?:\[\s*)?\{\s*"(?:type|name|function|parameters|arguments)")'
    )
    _KEYS = re.compile(r'"(?:parameters|arguments)"\s*:')
    #: What matters in prose: the tag, a fence of a code block, and a call at the start of a line.
    _IN_PROSE = re.compile(
        r'(?P<tag><\|python_(?:tag|start)\|>)|(?P<fence>```)|(?:(?<=[^\s\[{(,:"])|(?<=[^"]:))\s*\n[ \t]*'
        r'(?=(?:\[\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
        r'"(?:name|function)"\s*:\s*"[^"\n]{1,200}"\s*,\s*"(?:parameters|arguments)"\s*:)'
    )
    _NEXT = re.compile(r'<\|python_(?:tag|start)\|>|;\s*\{\s*"(?:type|name|function)"')

    def find(self, text: str, at: int) -> int:
        # A JSON object is an ordinary answer, unless it has the keys of a call.
        if self._BEGIN.match(text, at) and self._KEYS.search(text, at):
            return at
        for mark, fenced in marks_in_prose(self._IN_PROSE, text, at):
            if mark["tag"]:
                return mark.start()
            if not fenced:
                return mark.end()
        return -1

    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        beginning = self._BEGIN.match(text, at) or self._TAG.match(text, at)
        value, end = read_json(text, beginning.end() if beginning else at)
        return [self._call(each) for each in (value if isinstance(value, list) else [value])], end

    def _call(self, value: Any) -> ReadCall:
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        return call_of(value, names=("name", "function"))

    def resume(self, text: str, at: int) -> int:
        following = self._NEXT.search(text, at + 1)
        return following.start() if following else len(text)


class DeepSeek(ToolFormat):
    """DeepSeek V3 and R1, which write the arguments in a code fence, and V3.1, which writes no fence.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash
    ```json
    {"command": "ls"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    """

    name = "deepseek"
    form = (
        "Write <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜> with valid JSON."
    )
    noise = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    _OPEN, _SEPARATOR, _CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    #: Some answers omit the start of the first call.
    _BEGIN = re.compile(rf"{_OPEN}|<｜tool▁calls▁begin｜>(?!\s*(?:{_OPEN}|<｜tool▁calls▁end｜>|\Z))")
    _FENCE = "```"
    _FENCED = re.compile(r"```\w{0,12}\s*")

    def find(self, text: str, at: int) -> int:
        found = self._BEGIN.search(text, at)
        return found.start() if found else -1

    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        name, at = up_to(text, self._after_begin(text, at), self._SEPARATOR, "The name of a tool call")
        if name == "function" and not text.startswith("{", skip_space(text, at)):
            name, at = up_to(text, at, "\n", "The name of a tool call")
        at = skip_space(text, at)
        fenced = self._FENCED.match(text, at)
        close = self._FENCE if fenced else self._CLOSE
        arguments, end = read_arguments(text, fenced.end() if fenced else at, close)
        end = skip_space(text, end)
        if fenced and text.startswith(self._FENCE, end):
            end += len(self._FENCE)
        after = skip_space(text, end)
        if text.startswith(self.noise[1], after):  # some answers omit the inner end token
            return [checked(name, arguments)], after
        return [checked(name, arguments)], end_of(text, end, self._CLOSE)

    def resume(self, text: str, at: int) -> int:
        start = self._after_begin(text, at)
        return first_of(text, start, self._CLOSE, self.find(text, start))

    def _after_begin(self, text: str, at: int) -> int:
        begun = self._BEGIN.match(text, at)
        return begun.end() if begun else at


class Kimi(ToolFormat):
    """Kimi K2.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>
    {"command": "ls"}<|tool_call_end|><|tool_calls_section_end|>
    """

    name = "kimi"
    form = (
        "Write <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>"
        "{...}<|tool_call_end|><|tool_calls_section_end|> with valid JSON."
    )
    _ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    noise = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", *_ENDS)
    _OPEN, _ARGUMENTS, _CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    _ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")

    def find(self, text: str, at: int) -> int:
        return text.find(self._OPEN, at)

    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        call_id, at = up_to(text, at + len(self._OPEN), self._ARGUMENTS, "The id of a tool call")
        arguments, end = read_arguments(text, at, (self._CLOSE, *self._ENDS))
        call = checked(self._name(call_id, declared), arguments)
        after = skip_space(text, end)
        if text.startswith(self._ENDS, after):  # some answers omit the inner end token
            return [call], after
        return [call], end_of(text, end, self._CLOSE)

    def _name(self, call_id: str, declared: Declared) -> str:
        """Return the tool that an id names.

        Clients replace the dot and the colon of an id, or drop them; a model that sees such ids writes them.
        """
        named = self._ID.fullmatch(call_id)
        name = named[1] if named else ""
        if name in declared.schemas:
            return name
        similar = [
            tool
            for tool in declared.schemas
            if re.fullmatch(rf"(?:functions[._]?)?{re.escape(tool)}[:_]?\d*", call_id)
        ]
        return similar[0] if len(similar) == 1 else name

    def resume(self, text: str, at: int) -> int:
        return resume_behind(text, at, self._OPEN, self._CLOSE)


class Mistral(ToolFormat):
    """Mistral: a list of calls in the older format, one call per control token in the newer ones.

    [TOOL_CALLS][{"name": "bash", "arguments": {"command": "ls"}, "id": "abcdefghi"}]
    [TOOL_CALLS]bash[ARGS]{"command": "ls"}
    """

    name = "mistral"
    form = "Write [TOOL_CALLS]NAME[ARGS]{...} with valid JSON."
    _OPEN = "[TOOL_CALLS]"
    _NAMED = re.compile(r"\s*([^\s\[\]{}]+?)\s*(?:\[CALL_ID\][^\[\]{}]{0,80})?(?:\[ARGS\])?\s*(?=\{)")

    def find(self, text: str, at: int) -> int:
        return text.find(self._OPEN, at)

    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        at += len(self._OPEN)
        if not text.startswith(("[", "{"), skip_space(text, at)):
            named = self._NAMED.match(text, at)
            if not named:
                raise Malformed("A tool call does not begin with the tool's name.")
            arguments, end = read_object(text, named.end())
            return [checked(named[1], arguments)], end
        value, end = read_json(text, at)
        return [call_of(item) for item in (value if isinstance(value, list) else [value])], end

    def resume(self, text: str, at: int) -> int:
        following = text.find(self._OPEN, at + len(self._OPEN))
        return following if following >= 0 else len(text)
