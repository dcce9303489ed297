"""Conversations as chat messages, in OpenAI's format and as chat templates read them."""

from collections.abc import Mapping
from typing import Any

from prorl_envs.rollout.api.types import Result
from prorl_envs.strict_json import json_object

_TEXT_FIELDS = ("reasoning_content", "tool_call_id", "name")


def text_of(content: Any) -> str:
    """Return the text of a message's content: the content itself, or the text parts of a list."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return "" if content is None else str(content)


def message_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the fields of OpenAI's format and `reasoning_content`, without empty fields."""
    found: dict[str, Any] = {"role": str(message["role"]), "content": text_of(message.get("content"))}
    found.update((name, str(message[name])) for name in _TEXT_FIELDS if message.get(name))
    if message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return found


def training_messages(result: Result) -> list[dict[str, Any]]:
    """Return the conversation up to the model's last message; empty if the model wrote nothing.

    Later messages are omitted: nothing is learned from them, and LLaMA-Factory rejects conversations that do
    not end with the model. Arguments of tool calls are objects, since many chat templates render arguments
    that are text as a JSON string, or refuse them.
    """
    messages = [message_of(message) for message in result.messages]
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    for message in messages:
        for call in message.get("tool_calls", ()):
            text = call["function"]["arguments"]
            parsed = json_object(text)
            call["function"]["arguments"] = text if parsed is None else parsed
    return messages


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function: Mapping[str, Any] = call["function"]
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": str(function["name"]), "arguments": str(function["arguments"])},
    }
