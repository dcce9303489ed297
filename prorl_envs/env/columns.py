"""Columns that public data sets have in common: chat messages, objects as JSON texts, nulls for nothing."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from prorl_envs.errors import InputError


def without_nulls(value: Any) -> Any:
    """Return an object without its nulls, which readers of tables write for fields that a row lacks; return
    any other value unchanged."""
    if not isinstance(value, Mapping):
        return value
    return {key: item for key, item in value.items() if item is not None}


#: Annotation of an object whose values are never null.
WITHOUT_NULLS = BeforeValidator(without_nulls)


class RowModel(BaseModel):
    """Base of the models of a row and its parts. Unknown fields are refused. A null is no field, unless the
    field is required: then it may be a value, such as the expected result of a call."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in row.items() if value is not None or name in required}


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
