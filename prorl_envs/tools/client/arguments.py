"""Validation of a model's arguments against the schema of a tool. Pure."""

from typing import Any

from prorl_envs.tools.protocol.tree import is_utf8
from prorl_envs.tools.types import JsonObject, ToolSpec

#: Maximum characters of a text argument.
TEXT_LIMIT = 4 * 1024 * 1024
#: Maximum items of a list, and maximum absolute value of a number.
LIST_LIMIT = 1000
INTEGER_LIMIT = 2**53

_NAMES = {"string": "a string", "integer": "a whole number", "boolean": "true or false", "array": "a list"}


def complaint(spec: ToolSpec, arguments: object) -> str:
    """Return the error in a call's arguments, for the model to read.

    Args:
        spec: the tool; its schema may use type, properties, required, items, enum.
        arguments: arguments from the model, of any type.

    Returns:
        One sentence, or the empty string if the arguments are valid.
    """
    if not isinstance(arguments, dict):
        return f"{spec.name}: the arguments must be an object"
    properties: JsonObject = spec.parameters["properties"]
    if unknown := [name for name in arguments if name not in properties]:
        known = ", ".join(properties)
        return f"{spec.name}: unknown argument {str(unknown[0])[:50]!r}; it takes: {known or 'nothing'}"
    if missing := [name for name in spec.parameters["required"] if name not in arguments]:
        return f"{spec.name}: the argument {missing[0]!r} is missing"
    for name, value in arguments.items():
        if wrong := _wrong(properties[name], value):
            return f"{spec.name}: the argument {name!r} {wrong}"
    return ""


def _wrong(schema: JsonObject, value: Any) -> str:
    match schema["type"], value:
        case "string", str():
            return _wrong_text(schema, value)
        case "boolean", bool():
            return ""
        case "integer", int() if not isinstance(value, bool):
            return "is too large" if abs(value) > INTEGER_LIMIT else ""
        case "array", list():
            if len(value) > LIST_LIMIT:
                return f"has more than {LIST_LIMIT} items"
            problems = (_wrong(schema["items"], item) for item in value)
            return next((f"holds an item that {problem}" for problem in problems if problem), "")
        case kind, _:
            return f"must be {_NAMES[kind]}"


def _wrong_text(schema: JsonObject, text: str) -> str:
    if len(text) > TEXT_LIMIT:
        return f"is longer than {TEXT_LIMIT} characters"
    if not is_utf8(text):  # JSON allows lone surrogates
        return "holds half of a surrogate pair, which is no character"
    if "enum" in schema and text not in schema["enum"]:
        return f"must be one of: {', '.join(schema['enum'])}"
    return ""
