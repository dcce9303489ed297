"""When two requests say the same: what stands for a conversation up to each of its messages.

Of an answer it is what it says and calls that counts: not the ids of calls, nor white space around it, nor
its reasoning, of which harnesses keep what they like, nor how JSON is spelt.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from prorl_envs.env.base import Message
from prorl_envs.tools.types import ToolSpec


def keys_of(messages: Sequence[Message]) -> list[bytes]:
    """For each message, what stands for the conversation up to it."""
    keys: list[bytes] = []
    for message in messages:
        keys.append(key_of(keys[-1] if keys else b"", message))
    return keys


def key_of(before: bytes, message: Message) -> bytes:
    """What stands for a conversation with one more message.

    Args:
        before: the key of what comes before it; empty for nothing.
        message: the last one.
    """
    role, content = message["role"], message["content"]
    if role != "assistant":
        return _digest(content, before + role.encode())
    calls = [[call["function"]["name"], _arguments(call)] for call in message.get("tool_calls") or ()]
    said = _digest(content.strip(), before + role.encode())
    return _digest(json.dumps(calls, sort_keys=True), said) if calls else said


def key_of_tools(tools: Sequence[ToolSpec]) -> bytes:
    """What stands for the tools on offer."""
    return _digest(json.dumps([(tool.name, tool.description, tool.parameters) for tool in tools]))


def _digest(text: str, before: bytes = b"") -> bytes:
    return blake2b(before + b"\0" + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _arguments(call: Message) -> Any:
    """The arguments of a call, read where they can be: clients write JSON in their own ways."""
    try:
        return json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return call["function"]["arguments"]
