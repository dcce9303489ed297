"""Repetition and context limits of the agent loop. Pure."""

import json
from collections import deque
from collections.abc import Sequence

from prorl_envs.env.base import Message
from prorl_envs.tools.types import ToolCall

#: Shortest length in characters to which an observation is cut.
_MIN_LENGTH = 200
_LOW_BUDGET = "Only about {tokens} tokens of the context are left. Finish now, with what you have."


class RepeatDetector:
    """Detector of repeated turns: consecutive turns with the same calls and the same outcomes, or two turns
    that alternate.

    Args:
        limit: number of repetitions; 0 disables the detector.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: deque[str] = deque(maxlen=2 * limit)

    def noticed(self, calls: Sequence[ToolCall], observations: Sequence[Message]) -> bool:
        """Record a turn; return True if it reaches the limit. Turns without calls reset the count."""
        if not self._limit:
            return False
        if not calls:
            self._turns.clear()
            return False
        actions = [[call.name, call.arguments] for call in calls]
        outcomes = [message["content"] for message in observations]
        self._turns.append(json.dumps([actions, outcomes], sort_keys=True))
        turns = list(self._turns)
        repeated = len(set(turns[-self._limit :])) == 1 and len(turns) >= self._limit
        return repeated or (len(turns) == 2 * self._limit and turns[2:] == turns[:-2])


def cut(text: str, limit: int) -> str:
    """Return `text`, or its head and tail with a line between them that counts the omitted characters. Head
    and tail together have `limit` characters."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit - limit // 2], text[len(text) - limit // 2 :]
    return f"{head}\n[{len(text) - limit} characters left out]\n{tail}"


def cut_all(observations: Sequence[Message], limit: int) -> list[Message]:
    """Return the observations, each cut to about `limit` characters."""
    return [{**message, "content": cut(message["content"], limit)} for message in observations]


def cut_sizes(observations: Sequence[Message]) -> list[int]:
    """Return the lengths to try when cutting observations, in characters; each is half of the one before."""
    lengths, length = [], max((len(message["content"]) for message in observations), default=0)
    while length > _MIN_LENGTH:
        length //= 2
        lengths.append(max(length, _MIN_LENGTH))
    return lengths


def low_budget_warning(tokens: int) -> Message:
    """Return the message that warns the model that its context is almost full."""
    return {"role": "user", "content": _LOW_BUDGET.format(tokens=tokens)}
