"""What an agent said last, as a NeMo Gym response carries it."""

from collections.abc import Sequence
from typing import Any


def last_words(output: Sequence[Any]) -> str:
    """The text of the messages that end a response; empty where a tool call or its result ends it.

    Args:
        output: items of the Responses API, as objects.
    """
    texts: list[str] = []
    for item in reversed(output):
        kind = getattr(item, "type", "")
        if kind == "reasoning":
            continue
        if kind != "message" or getattr(item, "role", "assistant") != "assistant":
            break
        content = getattr(item, "content", "")
        parts = [content] if isinstance(content, str) else [getattr(part, "text", "") for part in content]
        texts.append("".join(part for part in parts if isinstance(part, str)))
    return "\n".join(reversed(texts))
