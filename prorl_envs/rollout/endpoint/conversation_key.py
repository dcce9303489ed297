"""Keys of conversations. Two requests have equal keys up to a message if their content is equal up to it.

A key covers only the text and the tool calls of answers. It ignores what harnesses may change: the ids of
calls, surrounding white space, the formatting of JSON, and the reasoning.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from prorl_envs.env.base import Message
from prorl_envs.tools.types import ToolSpec


def keys_of(messages: Sequence[Message]) -> list[bytes]:
    """Return, for each message, the key of the conversation up to and including this message."""
    keys: list[bytes] = []
    for message in messages:
        keys.append(key_of(keys[-1] if keys else b"", message))
    return keys


def key_of(before: bytes, message: Message) -> bytes:
    """Return the key of a conversation with one more message.

    Args:
        before: key of the previous messages; empty if there are none.
        message: the new message.
    """
    role, content = message["role"], message["content"]
    if role != "assistant":
        return _digest(content, before + role.encode())
    calls = [[call["function"]["name"], _arguments(call)] for call in message.get("tool_calls") or ()]
    text_key = _digest(content.strip(), before + role.encode())
    return _digest(json.dumps(calls, sort_keys=True), text_key) if calls else text_key


def key_of_tools(tools: Sequence[ToolSpec]) -> bytes:
    """Return the key of the available tools."""
    return _digest(json.dumps([(tool.name, tool.description, tool.parameters) for tool in tools]))


def _digest(text: str, before: bytes = b"") -> bytes:
    return blake2b(before + b"\0" + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _arguments(call: Message) -> Any:
    """Return the arguments of a call: parsed if possible, since clients format JSON differently."""
    try:
        return json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return call["function"]["arguments"]
