"""Texts of a task: those that the agent is shown, and those that it must not see."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from prorl_envs.env.base import Environment, Task


def hidden_texts(family: type[Environment[Any]], task: Task) -> list[str]:
    """Return the texts of the reference, the tests and the right answers."""
    reference = task.model_dump(mode="json", include={"reference", "reference_answer"})
    return list(_texts([reference, family.parts(task)[1]]))


def shown_text(family: type[Environment[Any]], task: Task) -> str:
    """Return all texts that the agent is shown or that its sandbox begins with."""
    return "\n".join(_texts(family.parts(task)[0]))


def digest(family: type[Environment[Any]], task: Task) -> str:
    """Return a hash of all that an audit depends on: the whole task but its id."""
    return _hash([*family.parts(task), [call.model_dump() for call in task.reference], task.reference_answer])


def grading_digest(family: type[Environment[Any]], task: Task) -> str:
    """Return a hash of what decides the reward; of the whole task if the family does not say what does."""
    hidden = family.parts(task)[1]
    return _hash(hidden) if hidden else digest(family, task)


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif value is not None and not isinstance(value, bool):
        yield str(value)
