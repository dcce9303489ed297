"""Incremental parsing of an answer while it is sampled: finds the text that is final and can be streamed.

Text that may turn out to be a tool call or a control token is held back until more tokens have arrived. Tool
calls are sent when the answer is complete: until then they may still become unreadable.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import AssistantTurn, Partial
from prorl_envs.tools.types import ToolSpec

#: First characters of a tool call, in any of the supported formats.
_OPENINGS = "<[{"
#: Number of characters after which it is certain that such a character did not start a call.
_MAX_OPENING = 64


@dataclass(slots=True)
class IncrementalParser:
    """Parser of the growing text of one answer. It returns each piece of text once.

    Args:
        renderer: tokenizer and chat template of the model.
        tools: available tools.
        prompt_end: the last ids of the prompt.

    Attributes:
        reasoning, content: text that was returned so far.
    """

    renderer: TemplateRenderer
    tools: Sequence[ToolSpec]
    prompt_end: Sequence[int]
    reasoning: str = ""
    content: str = ""

    def new_text(self, ids: Sequence[int]) -> tuple[str, str]:
        """Return the reasoning and the content that have become final since the last call.

        Args:
            ids: all ids sampled so far.
        """
        if self.renderer.tool_format == "harmony" and _in_header(self.renderer.decode(ids)):
            return "", ""
        turn = self.renderer.parse(ids, self.tools, prompt_ids=self.prompt_end)
        if turn.malformed or turn.tool_calls:
            return "", ""
        return self._new_text(_final_text(turn.reasoning), _final_text(turn.content) if turn.content else "")

    def remaining(self, turn: AssistantTurn) -> tuple[str, str]:
        """Return the reasoning and the content of a complete answer that were not returned before."""
        return self._new_text(turn.reasoning, turn.content)

    def _new_text(self, reasoning: str, content: str) -> tuple[str, str]:
        new_text = ("", "")
        if reasoning.startswith(self.reasoning) and not self.content:
            new_text = (reasoning[len(self.reasoning) :], "")
            self.reasoning = reasoning
        if content.startswith(self.content):
            new_text = (new_text[0], content[len(self.content) :])
            self.content = content
        elif content and reasoning.startswith(self.content):  # reasoning whose start the model omitted
            new_text = (new_text[0], content)
            self.content = content
        return new_text


@dataclass(slots=True)
class LiveAnswer:
    """Answer that is being sampled, and possibly streamed to a client.

    Args:
        changed: set when more tokens were sampled.
        parser: parser of the answer; None before the prompt is ready.
        restarted: True if sampling started again, on another server.
        partial: all tokens sampled so far; None if the model server does not stream.
    """

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    parser: IncrementalParser | None = None
    restarted: bool = False
    partial: Partial | None = None
    _count: int = 0

    def receive(self, partial: Partial) -> None:
        """Receive all tokens sampled so far."""
        self.restarted |= len(partial.ids) < self._count
        self.partial, self._count = partial, len(partial.ids)
        self.changed.set()

    def new_text(self) -> tuple[str, str]:
        """Return the reasoning and the content that have become final since the last call."""
        if self.parser is None or self.restarted or self.partial is None:
            return "", ""
        return self.parser.new_text(self.partial.ids)

    @property
    def partly_sent(self) -> bool:
        """True if text of the answer was sent to the client."""
        return self.parser is not None and bool(self.parser.reasoning or self.parser.content)


def _in_header(text: str) -> bool:
    """Return True if an answer of gpt-oss ends within a message header, which would be parsed as text."""
    return text.rfind("<|message|>") <= max(text.rfind("<|start|>"), text.rfind("<|end|>"))


def _final_text(text: str) -> str:
    """Return the part of a growing text that is final: without trailing white space, an incomplete character
    at the end, or the possible start of a tool call."""
    text = text.rstrip().rstrip("\ufffd")
    if text[:1] in _OPENINGS:
        return ""
    for index in range(len(text) - 1, max(-1, len(text) - 1 - _MAX_OPENING), -1):
        if text[index] in _OPENINGS:
            text = text[:index]
    return text.rstrip()
