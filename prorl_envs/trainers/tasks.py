"""Task rows within the data sets of trainers: as JSON text, since rows may have differing columns. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from prorl_envs.errors import InputError


def to_text(task: Mapping[str, Any]) -> str:
    """A task row as the text that stands for it in a trainer's data set."""
    return json.dumps(task, ensure_ascii=False)


def from_text(text: Any) -> dict[str, Any]:
    """The task row that `to_text` wrote; a row that is none already is taken as it is.

    Raises:
        InputError: it is no JSON object.
    """
    if isinstance(text, Mapping):
        return dict(text)
    try:
        row = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise InputError("there is no task row in it", hint="make the trainer's data set with prompts()")
    return row
