"""JSON that other programs can read: in UTF-8, without NaN and infinities."""

import json
import math
from typing import Any, NoReturn


def encodable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode. Output of models and tools may contain them."""
    return text.encode("utf-8", "replace").decode()


def json_problem(value: object) -> str:
    """Return why `value` cannot be sent as JSON in UTF-8 (NaN, a lone surrogate, an object), or ""."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        return str(error)
    return ""


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object that a text contains; None for every other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"the number {number[:40]} is too large")
    return value


#: Decoder of arguments that a model wrote. A number beyond the range of floats is an error, not infinity.
#: strict=False allows raw newlines inside strings, which models write in shell commands.
STRICT_JSON = json.JSONDecoder(strict=False, parse_constant=_no_constant, parse_float=_finite)


def call_arguments(value: object) -> dict[str, Any] | None:
    """Return the arguments of a tool call: an object, or JSON of one, which some programs encode twice.

    Empty text and null stand for no arguments. Returns None for all other values.
    """
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = STRICT_JSON.decode(value) if value.strip() else None
            except (ValueError, RecursionError):
                return None
    if value is None:
        return {}
    return value if isinstance(value, dict) else None
