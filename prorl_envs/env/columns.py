"""Columns that public data sets have in common: chat messages and objects, possibly as JSON texts."""

import json
from collections.abc import Mapping
from typing import Any

from prorl_envs.errors import InputError


def decoded(value: Any) -> Any:
    """Return the object or list that a JSON text holds; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def user_text(value: Any, field: str) -> str:
    """Return a problem statement: a text, or the last user message of a chat.

    Args:
        value: a text, chat messages, or chat messages as a JSON text.
        field: name of the column, for the error.

    Raises:
        InputError: the value is neither a text nor a chat with a user message, or the text is empty.
    """
    messages = decoded(value)
    if isinstance(messages, list | tuple) and (messages is value or _is_chat(messages)):
        contents = [m.get("content") for m in messages if isinstance(m, Mapping) and m.get("role") == "user"]
        value = contents[-1] if contents else None
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{field}: neither a text nor chat messages with a user message")
    return value


def _is_chat(value: list[Any] | tuple[Any, ...]) -> bool:
    return bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)
