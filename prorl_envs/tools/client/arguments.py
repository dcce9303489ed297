"""Reading of a model's arguments by the schema of a tool. Pure."""

import json
from typing import Any

from prorl_envs.tools.protocol.tree import is_utf8
from prorl_envs.tools.types import JsonObject, ToolSpec

#: Maximum characters of a text argument.
TEXT_LIMIT = 4 * 1024 * 1024
#: Maximum items of a list, and maximum absolute value of a number.
LIST_LIMIT = 1000
INTEGER_LIMIT = 2**53

_NAMES = {"string": "a string", "integer": "a whole number", "boolean": "true or false", "array": "a list"}
#: Maximum characters of a list, number or truth value that a model writes as a text.
_WRITTEN_LIMIT = 64 * 1024


class _WrongArgumentError(Exception):
    """An argument is wrong; with the rest of a sentence that begins with its name."""


def read_arguments(spec: ToolSpec, arguments: object) -> JsonObject | str:
    """Read a call's arguments.

    Models write some values in another form than the schema's, and what they mean is plain: null for an
    optional argument that is not given, 3.0 for 3 (the same number in JSON Schema 2020-12, section 6.1.1),
    and the JSON text of a number, truth value or list. These are converted.

    Args:
        spec: the tool; its schema may use type, properties, required, items, enum.
        arguments: arguments from the model, of any type.

    Returns:
        the arguments by name, as the schema has them; or one sentence about an error, for the model.
    """
    if not isinstance(arguments, dict):
        return f"{spec.name}: the arguments must be an object"
    properties: JsonObject = spec.parameters["properties"]
    required = spec.parameters["required"]
    if unknown := [name for name in arguments if name not in properties]:
        known = ", ".join(properties)
        return f"{spec.name}: unknown argument {str(unknown[0])[:50]!r}; it takes: {known or 'nothing'}"
    if missing := [name for name in required if name not in arguments]:
        return f"{spec.name}: the argument {missing[0]!r} is missing"
    read: JsonObject = {}
    for name, value in arguments.items():
        if value is None and name not in required:
            continue
        try:
            read[name] = _read(properties[name], value)
        except _WrongArgumentError as error:
            return f"{spec.name}: the argument {name!r} {error}"
    return read


def _read(schema: JsonObject, value: Any) -> Any:
    kind = schema["type"]
    if isinstance(value, str) and kind != "string":
        value = _parsed(value)
    match kind, value:
        case "string", str():
            return _checked_text(schema, value)
        case "boolean", bool():
            return value
        case "integer", int() | float() if not isinstance(value, bool) and value % 1 == 0:
            if abs(value) > INTEGER_LIMIT:
                raise _WrongArgumentError("is too large")
            return int(value)
        case "array", list():
            if len(value) > LIST_LIMIT:
                raise _WrongArgumentError(f"has more than {LIST_LIMIT} items")
            try:
                return [_read(schema["items"], item) for item in value]
            except _WrongArgumentError as error:
                raise _WrongArgumentError(f"holds an item that {error}") from None
    raise _WrongArgumentError(f"must be {_NAMES[kind]}")


def _parsed(text: str) -> Any:
    """Return the value of a JSON text, of a truth value in any case; other texts as they are."""
    if len(text) > _WRITTEN_LIMIT:
        return text
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _checked_text(schema: JsonObject, text: str) -> str:
    if len(text) > TEXT_LIMIT:
        raise _WrongArgumentError(f"is longer than {TEXT_LIMIT} characters")
    if not is_utf8(text):  # JSON allows lone surrogates
        raise _WrongArgumentError("holds half of a surrogate pair, which is no character")
    if "enum" in schema and text not in schema["enum"]:
        raise _WrongArgumentError(f"must be one of: {', '.join(schema['enum'])}")
    return text
