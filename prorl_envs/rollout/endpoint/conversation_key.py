"""Keys of conversations: equal for requests with the same content, up to each message.

For answers, only their text and calls count. The ids of calls, surrounding white space, the spelling of JSON
and the reasoning, which harnesses may drop, are ignored.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from prorl_envs.env.base import Message
from prorl_envs.tools.types import ToolSpec


def keys_of(messages: Sequence[Message]) -> list[bytes]:
    """Return, for each message, the key of the conversation up to it."""
    keys: list[bytes] = []
    for message in messages:
        keys.append(key_of(keys[-1] if keys else b"", message))
    return keys


def key_of(before: bytes, message: Message) -> bytes:
    """Return the key of a conversation with one more message.

    Args:
        before: the key of the messages before; empty if there are none.
        message: the last one.
    """
    role, content = message["role"], message["content"]
    if role != "assistant":
        return _digest(content, before + role.encode())
    calls = [[call["function"]["name"], _arguments(call)] for call in message.get("tool_calls") or ()]
    said = _digest(content.strip(), before + role.encode())
    return _digest(json.dumps(calls, sort_keys=True), said) if calls else said


def key_of_tools(tools: Sequence[ToolSpec]) -> bytes:
    """Return the key of the available tools."""
    return _digest(json.dumps([(tool.name, tool.description, tool.parameters) for tool in tools]))


def _digest(text: str, before: bytes = b"") -> bytes:
    return blake2b(before + b"\0" + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _arguments(call: Message) -> Any:
    """Return the parsed arguments of a call if possible: clients format JSON differently."""
    try:
        return json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return call["function"]["arguments"]
