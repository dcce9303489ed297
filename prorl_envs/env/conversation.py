"""Writing down an episode that is played without the rollout service: by a person, a check, a loop."""

import json
from collections.abc import Sequence

from prorl_envs.env.base import Message, Prompt
from prorl_envs.tools.types import ToolCall, ToolResult


class Conversation:
    """The messages of one episode, as the rollout service would keep them.

    Args:
        prompt: what it began with.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._messages: list[Message] = [dict(message) for message in prompt.messages]

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    def said(self, text: str) -> None:
        """The model answered without a call."""
        self._messages.append({"role": "assistant", "content": text})

    def called(self, call: ToolCall, result: ToolResult) -> None:
        """The model called a tool, and this is what came of it."""
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        calls = [{"id": call.id, "type": "function", "function": function}]
        self._messages += (
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text},
        )
