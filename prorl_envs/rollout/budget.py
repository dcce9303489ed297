"""Loops and budgets of the agent loop. Pure."""

import json
from collections import deque
from collections.abc import Sequence

from prorl_envs.env.base import Message
from prorl_envs.tools.types import ToolCall

#: Shortest that an observation is cut to.
_LEAST = 200
_LAST_WORDS = "Only about {tokens} tokens of the context are left. Finish now, with what you have."


class Repeats:
    """Notices an agent that goes round in circles: the same calls with the same outcome, turn after turn, or
    two such turns in alternation.

    Args:
        limit: how often; 0 never notices.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: deque[str] = deque(maxlen=2 * limit)

    def noticed(self, calls: Sequence[ToolCall], observations: Sequence[Message]) -> bool:
        """Whether this turn is the one too many. Turns without calls break a circle."""
        if not self._limit:
            return False
        if not calls:
            self._turns.clear()
            return False
        done = [[call.name, call.arguments] for call in calls]
        seen = [message["content"] for message in observations]
        self._turns.append(json.dumps([done, seen], sort_keys=True))
        turns = list(self._turns)
        same = len(set(turns[-self._limit :])) == 1 and len(turns) >= self._limit
        return same or (len(turns) == 2 * self._limit and turns[2:] == turns[:-2])


def cut(text: str, most: int) -> str:
    """`text`, or its beginning and end with a line that says what was left out; at most `most` characters and
    that line."""
    if len(text) <= most:
        return text
    head, tail = text[: most - most // 2], text[len(text) - most // 2 :]
    return f"{head}\n[{len(text) - most} characters left out]\n{tail}"


def shorter(observations: Sequence[Message], most: int) -> list[Message]:
    """The observations, none longer than about `most` characters."""
    return [{**message, "content": cut(message["content"], most)} for message in observations]


def sizes(observations: Sequence[Message]) -> list[int]:
    """What to try to cut observations to: each half as long as the one before."""
    found, size = [], max((len(message["content"]) for message in observations), default=0)
    while size > _LEAST:
        size //= 2
        found.append(max(size, _LEAST))
    return found


def last_words(tokens: int) -> Message:
    """What a model is told once when its context is about to be full."""
    return {"role": "user", "content": _LAST_WORDS.format(tokens=tokens)}
