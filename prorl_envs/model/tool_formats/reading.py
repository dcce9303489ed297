"""Common parts of all tool call formats: the loop over a turn, JSON parsing, types, and limits.

Parsing is total: every text gives calls, content and error messages. A malformed call becomes a short message
for the model. Calls inside reasoning do not count, because the model only considers them. If the reasoning
has no end, the model receives a message, because it may have meant the call.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prorl_envs.model.tool_formats.schema_types import ANY, SchemaTypes, Types, type_name
from prorl_envs.strict_json import STRICT_JSON, call_arguments
from prorl_envs.tools.types import JsonObject, ToolSpec

#: Maximum calls read from one turn; the others are dropped, and the model receives a message.
MAX_CALLS = 64
MAX_NAME = 200
#: Maximum blocks of closed reasoning at the start of a turn that are read as reasoning.
MAX_THOUGHTS = 64
_MAX_DEPTH = 64
_SPACE = re.compile(r"\s*")
#: A quoted text of Python, up to the end if it is not closed, or a constant.
_PYTHON_TOKEN = re.compile(
    r"\"(?:[^\"\\]|\\.)*+\"?|'(?P<text>(?:[^'\\]|\\.)*+)(?P<closed>'?)|\b(?:True|False|None)\b", re.DOTALL
)
_ESCAPES = re.compile(r"\\.|\"", re.DOTALL)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
#: Keys of a call's arguments in JSON, and further keys that are not arguments.
_ARGUMENTS, _NO_ARGUMENTS = ("arguments", "parameters"), ("id", "type")

#: Start and end texts of reasoning.
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
    ("◁think▷", "◁/think▷"),
)


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A well-formed call: name and arguments."""

    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """The parsed text of a turn.

    Args:
        content: the text outside reasoning and tool calls, stripped.
        calls: the well-formed calls, in order.
        malformed: one message for the model per call that could not be read.
        reasoning: the text inside reasoning, stripped.
    """

    content: str
    calls: tuple[ReadCall, ...]
    malformed: tuple[str, ...]
    reasoning: str = ""


class Malformed(ValueError):
    """A call that cannot be read; the message is written for the model."""


@dataclass(frozen=True, slots=True)
class Declared:
    """Types that tools declare for their parameters, for formats that write values without quotes.

    Args:
        schemas: by tool, the types that the JSON schema of its arguments allows.
    """

    schemas: Mapping[str, SchemaTypes] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Iterable[ToolSpec]) -> "Declared":
        """Return the declarations of the offered tools."""
        return cls({tool.name: SchemaTypes(tool.parameters) for tool in tools})

    def value(self, tool: str, parameter: str, text: str) -> Any:
        """Convert a value written without quotes to the declared type; if a text is allowed, return the text.
        Without a declared type, convert JSON objects and lists. If the conversion fails, return the text, so
        that the tool's error message names the expected type."""
        types, listed = self.schemas.get(tool, _NO_SCHEMA).parameter(parameter)
        if "string" in types and not listed:
            return text
        try:
            value = decode(text.strip())
        except Malformed:
            value = self._of_python(text, types)
        if text in listed or value in listed:
            return text if text in listed else value
        if "string" in types:
            return text
        if ANY in types and type_name(value) not in (*types, "object", "array"):
            return text
        return value

    def quoted(self, tool: str, parameter: str, text: str) -> Any:
        """Convert a quoted value to the declared type, if the type is known and no text."""
        types, _ = self.schemas.get(tool, _NO_SCHEMA).parameter(parameter)
        return text if types & {ANY, "string"} else self.value(tool, parameter, text)

    def _of_python(self, text: str, types: Types) -> Any:
        """Return the value of a literal of Python, `['a']`, if it has one of the types; else the text."""
        try:
            value = decode(in_json(text.strip()))
        except Malformed:
            return text
        return value if type_name(value) in types else text


_NO_SCHEMA = SchemaTypes({})
#: Declarations of no tools.
NOTHING_DECLARED = Declared()


class ToolFormat(ABC):
    """A format for writing tool calls.

    Class attributes:
        name: name in the settings.
        form: description of a call, for a model that wrote a malformed call.
        noise: control texts around calls that are not content.
    """

    name: str
    form: str
    noise: tuple[str, ...] = ()

    @abstractmethod
    def find(self, text: str, at: int) -> int:
        """Return the start of the next call at or after `at`; -1 if there is none."""

    @abstractmethod
    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        """Parse the call at `at` (or several calls that share one opening). Return the calls and their end.

        Raises:
            Malformed: the call cannot be read.
        """

    @abstractmethod
    def resume(self, text: str, at: int) -> int:
        """Return the position at which to continue after a malformed call at `at`."""

    def turn(self, text: str, *, opened: str = "", declared: Declared = NOTHING_DECLARED) -> ReadTurn:
        """Parse one assistant turn.

        Args:
            text: the turn without its stop token.
            opened: text that ends the reasoning, if the prompt contains the start of the reasoning.
            declared: declarations of the offered tools.
        """
        opened = opened or self._implied_close(text, declared)
        reasoning, at, close = split_reasoning(text, opened)
        while at and not close and (end := self._end_of_call_around(text, at, declared)):
            reasoning, at, close = split_reasoning(text, opened, end)
        for _ in range(MAX_THOUGHTS if at and not close else 0):
            more, length, missing = split_reasoning(text[at:])
            if not length or missing or self._end_of_call_around(text, at + length, declared):
                break
            reasoning, at = f"{reasoning}\n\n{more}".strip(), at + length
        outside, calls, malformed = list[str](), list[ReadCall](), list[str]()
        if close and self.find(reasoning, 0) >= 0:
            malformed.append(
                f"A tool call in reasoning does not count, and {close} is missing before it. {self.form}"
            )
        while (found := self.find(text, at)) >= 0:
            outside.append(text[at:found])
            if len(calls) + len(malformed) >= MAX_CALLS:
                malformed.append(f"Only the first {MAX_CALLS} tool calls of a turn are read.")
                at = len(text)
                break
            try:
                read, at = self.read(text, found, declared)
                calls.extend(read[: MAX_CALLS - len(calls) - len(malformed)])
            except Malformed as error:
                malformed.append(f"{error} {self.form}" if self.form else str(error))
                at = self.resume(text, found)
        outside.append(text[at:])
        content = "".join(outside)
        for literal in self.noise:
            content = content.replace(literal, "")
        return ReadTurn(content.strip(), tuple(calls), tuple(malformed), reasoning)

    def _implied_close(self, text: str, declared: Declared) -> str:
        """Return the end of reasoning whose start the model omitted; "" if there is none."""
        for begin, end in THOUGHTS:
            at = text.find(end)
            for _ in range(MAX_CALLS):
                if at < 0 or text.find(begin, 0, at) >= 0:
                    break
                after = self._end_of_call_around(text, at, declared)
                if not after:
                    return end
                at = text.find(end, after)
        return ""

    def _end_of_call_around(self, text: str, position: int, declared: Declared) -> int:
        """Return the end of the call that encloses `position`; 0 if there is none."""
        at = 0
        for _ in range(MAX_CALLS):
            found = self.find(text, at)
            if not 0 <= found < position:
                break
            try:
                _, at = self.read(text, found, declared)
            except Malformed:
                at = self.resume(text, found)
            else:
                if at > position:
                    return at
        return 0


def split_reasoning(text: str, opened: str = "", after: int = 0) -> tuple[str, int, str]:
    """Split the reasoning from the start of a turn. Unclosed reasoning extends to the end of the text.

    Args:
        text: the turn.
        opened: text that ends the reasoning, if the prompt contains the start of the reasoning.
        after: first position at which the reasoning may end.

    Returns:
        the reasoning, the position after it, and the missing text that should end it ("" if it is closed).
    """
    start = skip_space(text, 0)
    close = opened
    for begin, end in THOUGHTS:
        if text.startswith(begin, start):
            start, close = start + len(begin), end
            break
    if not close:
        return "", 0, ""
    found = text.find(close, max(start, after))
    if found < 0:
        return text[start:].strip(), len(text), close
    return text[start:found].strip(), found + len(close), ""


def left_open(prompt: str, *, only_last: bool = False) -> str:
    """Return the text that would end the reasoning that a prompt left open; "" if no reasoning is open.

    Args:
        prompt: text of the prompt, or of its last part.
        only_last: consider only the last characters, because earlier text may come from a tool.
    """
    if only_last:
        tail = prompt.rstrip()
        return next((end for begin, end in THOUGHTS if tail.endswith(begin.rstrip())), "")
    return next((end for begin, end in THOUGHTS if prompt.rfind(begin) > prompt.rfind(end)), "")


def continued(prompt: str, written: str) -> str | None:
    """Return the text that a model must sample after `prompt` to get `written`; None if that is impossible.

    Args:
        prompt: text that ends with the generation prompt, which may contain the start of the reasoning.
        written: text that the template writes for the same conversation and the answer.
    """
    if written.startswith(prompt):
        return written[len(prompt) :]
    for begin, end in THOUGHTS:
        base, found, _ = prompt.rpartition(begin.rstrip())
        if found and written.startswith(base) and left_open(prompt, only_last=True) == end:
            answer = written[len(base) :].removeprefix(begin.rstrip())
            return answer if answer.lstrip().startswith(end) else f"{end}\n\n{answer}"
    return None


def read_json(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value at `start`, after optional white space. Return it and its end.

    The decoder finds the end. A search for a closing tag would fail if a string in the JSON contains the tag.

    Raises:
        Malformed: there is no such value.
    """
    try:
        return STRICT_JSON.raw_decode(text, skip_space(text, start))
    except RecursionError:
        raise Malformed("The JSON of a tool call is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise Malformed(_what_is_wrong(text, error)) from None
    except ValueError as error:
        raise Malformed(f"The JSON of a tool call cannot be read: {str(error)[:80]}.") from None


def read_object(text: str, start: int) -> tuple[JsonObject, int]:
    """Parse a JSON object as `read_json` does.

    Raises:
        Malformed: there is no such object.
    """
    if not text.startswith("{", skip_space(text, start)):
        raise Malformed("A tool call is not a JSON object.")
    value, end = read_json(text, start)
    return value, end


def read_arguments(text: str, start: int, close: str | tuple[str, ...]) -> tuple[JsonObject, int]:
    """Parse a JSON object as `read_object` does. There are no arguments if `close` is at `start`.

    Raises:
        Malformed: there is no such object.
    """
    start = skip_space(text, start)
    return ({}, start) if text.startswith(close, start) else read_object(text, start)


def decode(text: str) -> Any:
    """Return the JSON value that is the whole of `text`.

    Raises:
        Malformed: the text is not one JSON value.
    """
    value, end = read_json(text, 0)
    if skip_space(text, end) != len(text):
        raise Malformed("There is text after the JSON of a tool call.")
    return value


def in_json(literal: str) -> str:
    """Return a literal of Python as JSON: its quotes and constants are replaced, all other text stays."""
    return _PYTHON_TOKEN.sub(_token_in_json, literal)


def _token_in_json(token: re.Match[str]) -> str:
    if token["text"] is None or not token["closed"]:
        return _CONSTANTS.get(token[0], token[0])
    text = _ESCAPES.sub(lambda found: {"\\'": "'", '"': '\\"'}.get(found[0], found[0]), token["text"])
    return f'"{text}"'


def call_of(value: Any, *, names: Sequence[str] = ("name",)) -> ReadCall:
    """Return the call in a JSON value.

    Args:
        value: decoded JSON.
        names: possible keys of the name.

    Raises:
        Malformed: the value contains no call, or arguments under another key.
    """
    if not isinstance(value, dict):
        raise Malformed("A tool call is not a JSON object.")
    name = next((value[key] for key in names if key in value), None)
    given = [value[key] for key in _ARGUMENTS if key in value]
    if not given and (others := value.keys() - {*names, *_NO_ARGUMENTS}):
        raise Malformed(f"A tool call has no arguments, but {min(others)[:40]!a}.")
    return checked(name, given[0] if given else {})


def checked(name: Any, arguments: Any) -> ReadCall:
    """Return a call with a valid name and with arguments that all later code can handle.

    Raises:
        Malformed: the name or the arguments are invalid.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise Malformed("A tool call has no usable name.")
    found = call_arguments(arguments)
    if found is None:
        raise Malformed(f"The arguments of the call to {name!a} are not a JSON object.")
    _check_tree(name, [name, found])
    return ReadCall(name, found)


def skip_space(text: str, start: int) -> int:
    """Return the position after white space."""
    found = _SPACE.match(text, start)
    return found.end() if found else start


def end_of(text: str, start: int, close: str, *, preceding: str = "") -> int:
    """Return the position after `close`, which may follow white space. At the end of the text `close` may be
    missing, because the call is complete without it.

    Raises:
        Malformed: other text follows.
    """
    start = skip_space(text, start)
    if text.startswith(close, start):
        return start + len(close)
    if start != len(text):
        raise Malformed(f"There is text between {preceding or 'the JSON of a tool call'} and {close}.")
    return start


def up_to(text: str, start: int, close: str, subject: str) -> tuple[str, int]:
    """Return a short text up to `close`, stripped, and the position after `close`.

    Raises:
        Malformed: `close` is missing or too far away, or another tag or line starts before it.
    """
    found = text.find(close, start, start + MAX_NAME + len(close) + 2)
    short = text[start : max(found, start)].strip()
    if found < 0 or "<" in short or "\n" in short:
        raise Malformed(f"{subject} is not complete: {close} is missing.")
    return short, found + len(close)


def resume_behind(text: str, at: int, opening: str, close: str) -> int:
    """Return the position after the next closing tag, or of the next opening tag, whichever comes first."""
    start = at + len(opening)
    return first_of(text, start, close, text.find(opening, start))


def marks_in_prose(marks: re.Pattern[str], text: str, at: int) -> Iterator[tuple[re.Match[str], bool]]:
    """Yield the matches of a pattern from `at` on, and whether each is in a code block.

    Matches of the pattern's group `fence` start and end the blocks, and are not yielded.
    """
    fenced = False
    for mark in marks.finditer(text, at):
        if mark["fence"]:
            fenced = not fenced
        else:
            yield mark, fenced


def first_of(text: str, start: int, close: str, opened: int) -> int:
    """Return as `resume_behind`; `opened` is the position of the next opening tag, or -1."""
    closed = text.find(close, start)
    if closed >= 0 and (opened < 0 or closed < opened):
        return closed + len(close)
    return opened if opened >= 0 else len(text)


def _what_is_wrong(text: str, error: json.JSONDecodeError) -> str:
    if error.pos >= len(text) or error.msg.startswith("Unterminated string"):
        return "A tool call was cut off before its JSON was complete."
    return f"The JSON of a tool call is not valid: {error.msg} near {text[error.pos : error.pos + 20]!r}."


def _check_tree(name: str, value: list[Any]) -> None:
    """Reject arguments that later code cannot handle: excessive nesting, text without a UTF-8 form."""
    stack: list[tuple[Any, int]] = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if depth > _MAX_DEPTH:
            raise Malformed("The JSON of a tool call is nested too deeply.")
        if isinstance(item, str):
            if not _has_utf8(item):
                raise Malformed(f"The arguments of the call to {name!a} hold half of a surrogate pair.")
        elif isinstance(item, dict):
            stack.extend((part, depth + 1) for pair in item.items() for part in pair)
        elif isinstance(item, list):
            stack.extend((part, depth + 1) for part in item)


def _has_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
