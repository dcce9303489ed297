"""JSON as other programs read it: in UTF-8, without NaN and infinities."""

import json


def json_problem(value: object) -> str:
    """Return why `value` cannot be sent as JSON in UTF-8 (NaN, a lone surrogate, an object), or ""."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        return str(error)
    return ""
