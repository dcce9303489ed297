"""Task rows in the data sets of trainers. They are JSON text, since rows may have different columns. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from prorl_envs.errors import InputError


def to_text(task: Mapping[str, Any]) -> str:
    """Convert a task row to its text in a trainer's data set."""
    return json.dumps(task, ensure_ascii=False)


def chat_prompt(task: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a prompt for data sets that require one. The service renders its own."""
    return [{"role": "user", "content": str(task.get("instruction", task.get("id", "task")))}]


def from_text(text: Any) -> dict[str, Any]:
    """Parse the text of `to_text`. A row that is already a mapping is copied.

    Raises:
        InputError: the text is not a JSON object.
    """
    if isinstance(text, Mapping):
        return dict(text)
    try:
        row = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise InputError("the row contains no task", hint="create the data set with this adapter's function")
    return row
