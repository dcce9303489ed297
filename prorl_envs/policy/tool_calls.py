"""Reads tool calls in the Hermes form, which Qwen and many others are trained on:

    <tool_call>
    {"name": "bash", "arguments": {"command": "ls"}}
    </tool_call>

Total: every text gives calls and messages. What cannot be read becomes a short message for the model.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from prorl_envs.tools.types import JsonObject

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

#: Most calls read from one turn; a turn with more is cut, and told so.
MAX_CALLS = 64
_MAX_NAME = 200
_MAX_DEPTH = 64
_SPACE = re.compile(r"\s*")
_FORM = 'Write <tool_call>{"name": ..., "arguments": {...}}</tool_call> with valid JSON.'


@dataclass(frozen=True, slots=True)
class ReadCall:
    """One well-formed call: name and arguments."""

    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """A turn's text, read.

    Args:
        content: the text outside tool calls, reasoning included, stripped.
        calls: the well-formed calls, in order.
        malformed: one message per call that could not be read, written for the model.
    """

    content: str
    calls: tuple[ReadCall, ...]
    malformed: tuple[str, ...]


class _Malformed(ValueError):
    """The message is written for the model."""


def read_turn(text: str, *, thinking: bool = False) -> ReadTurn:
    """Read one assistant turn.

    Args:
        text: the turn without its stop token.
        thinking: the generation prompt already opened a `<think>` block. Calls inside reasoning are not
            calls: the model is only thinking of them.
    """
    start = _end_of_reasoning(text, thinking)
    outside, calls, malformed = [text[:start]], list[ReadCall](), list[str]()
    at = start
    while (found := text.find(OPEN, at)) >= 0:
        outside.append(text[at:found])
        if len(calls) + len(malformed) == MAX_CALLS:
            malformed.append(f"Only the first {MAX_CALLS} tool calls of a turn are read.")
            at = len(text)
            break
        try:
            call, at = _read_call(text, found + len(OPEN))
            calls.append(call)
        except _Malformed as error:
            malformed.append(str(error))
            at = _resume(text, found + len(OPEN))
    outside.append(text[at:])
    return ReadTurn("".join(outside).strip(), tuple(calls), tuple(malformed))


def _end_of_reasoning(text: str, thinking: bool) -> int:
    if not thinking and not text.lstrip().startswith(THINK_OPEN):
        return 0
    closed = text.find(THINK_CLOSE)
    return len(text) if closed < 0 else closed + len(THINK_CLOSE)


def _read_call(text: str, start: int) -> tuple[ReadCall, int]:
    """The call whose JSON begins after `start`, and where the text goes on.

    The JSON decoder finds the end, not a search for `</tool_call>`: a file the model writes may hold that
    text. A missing closing tag at the very end is forgiven, as the call is complete without it.
    """
    start = _skip_space(text, start)
    if text[start : start + 1] != "{":
        raise _Malformed(f"A tool call is not a JSON object. {_FORM}")
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise _Malformed("The JSON of a tool call is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise _Malformed(_what_is_wrong(text, error)) from None
    except ValueError:  # a number of thousands of digits, or NaN
        raise _Malformed("A number in the JSON of a tool call cannot be read.") from None
    end = _skip_space(text, end)
    if text.startswith(CLOSE, end):
        end += len(CLOSE)
    elif end != len(text):
        raise _Malformed(f"There is text between the JSON of a tool call and {CLOSE}.")
    return _as_call(value), end


def _what_is_wrong(text: str, error: json.JSONDecodeError) -> str:
    if error.pos >= len(text) or error.msg.startswith("Unterminated string"):
        return f"A tool call was cut off before its JSON was complete. {_FORM}"
    near = text[error.pos : error.pos + 20]
    return f"The JSON of a tool call is not valid: {error.msg} near {near!r}. {_FORM}"


def _as_call(value: JsonObject) -> ReadCall:
    name = value.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise _Malformed(f"A tool call has no usable name. {_FORM}")
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models quote the object a second time
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            raise _Malformed(f"The arguments of the call to {name!r} are not a JSON object.") from None
    if not isinstance(arguments, dict):
        raise _Malformed(f"The arguments of the call to {name!r} are not a JSON object.")
    _check_tree(name, [name, arguments])
    return ReadCall(name, arguments)


def _resume(text: str, start: int) -> int:
    """Where to go on after a malformed call: behind its closing tag, or at the next opening one."""
    closed, opened = text.find(CLOSE, start), text.find(OPEN, start)
    if closed >= 0 and (opened < 0 or closed < opened):
        return closed + len(CLOSE)
    return opened if opened >= 0 else len(text)


def _skip_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start


def _check_tree(name: str, value: list[Any]) -> None:
    """Refuse what would hurt whoever handles the arguments next: bottomless nesting, text without UTF-8."""
    stack: list[tuple[Any, int]] = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if depth > _MAX_DEPTH:
            raise _Malformed("The JSON of a tool call is nested too deeply.")
        if isinstance(item, str):
            if not _has_utf8(item):
                raise _Malformed(f"The arguments of the call to {name!a} hold half of a surrogate pair.")
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


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


# strict=False admits raw newlines inside strings, which models write in shell commands.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)
