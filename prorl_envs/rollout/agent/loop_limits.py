"""Repetition and context limits of the agent loop. Pure."""

import json
from collections import deque
from collections.abc import Sequence

from prorl_envs.env.base import Message
from prorl_envs.tools.types import ToolCall

#: Shortest length to which an observation is cut.
_LEAST = 200
_LAST_WORDS = "Only about {tokens} tokens of the context are left. Finish now, with what you have."


class RepeatDetector:
    """Detector of repeated turns: the same calls with the same outcome, turn after turn, or two such turns in
    alternation.

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
        done = [[call.name, call.arguments] for call in calls]
        seen = [message["content"] for message in observations]
        self._turns.append(json.dumps([done, seen], sort_keys=True))
        turns = list(self._turns)
        same = len(set(turns[-self._limit :])) == 1 and len(turns) >= self._limit
        return same or (len(turns) == 2 * self._limit and turns[2:] == turns[:-2])


def cut(text: str, most: int) -> str:
    """Return `text`, or its head and tail with a line that counts the omitted characters. The result has at
    most `most` characters and that line."""
    if len(text) <= most:
        return text
    head, tail = text[: most - most // 2], text[len(text) - most // 2 :]
    return f"{head}\n[{len(text) - most} characters left out]\n{tail}"


def shorter(observations: Sequence[Message], most: int) -> list[Message]:
    """Return the observations, each cut to about `most` characters."""
    return [{**message, "content": cut(message["content"], most)} for message in observations]


def sizes(observations: Sequence[Message]) -> list[int]:
    """Return the lengths to try when cutting observations, each half of the previous one."""
    found, size = [], max((len(message["content"]) for message in observations), default=0)
    while size > _LEAST:
        size //= 2
        found.append(max(size, _LEAST))
    return found


def last_words(tokens: int) -> Message:
    """Return the message that warns the model once that its context is almost full."""
    return {"role": "user", "content": _LAST_WORDS.format(tokens=tokens)}
