"""Transcript of an episode that runs without the rollout service: played by a person, a check, or a loop."""

import json
from collections.abc import Sequence

from prorl_envs.env.base import Message, Prompt
from prorl_envs.tools.types import ToolCall, ToolResult


class MessageLog:
    """Messages of one episode, in the format of the rollout service.

    Args:
        prompt: start of the episode.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._messages: list[Message] = [dict(message) for message in prompt.messages]

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    def said(self, text: str) -> None:
        """Record an answer of the model that contains no tool call."""
        self._messages.append({"role": "assistant", "content": text})

    def called(self, call: ToolCall, result: ToolResult) -> None:
        """Record a tool call of the model and its result."""
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        calls = [{"id": call.id, "type": "function", "function": function}]
        self._messages += (
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text},
        )
