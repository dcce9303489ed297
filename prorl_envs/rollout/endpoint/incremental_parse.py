"""Incremental parsing of an answer while it is sampled: finds the text that is final and can be streamed.

Text that may become a tool call, or the start of a control token's text, is held back until more tokens have
arrived. Tool calls are sent once the answer is complete: before that, they may still become unreadable.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from prorl_envs.model.types import AssistantTurn, Partial, Renderer
from prorl_envs.tools.types import ToolSpec

#: First characters of a tool call, in any of the known formats.
_OPENINGS = "<[{"
#: Number of characters after which such a character cannot have started a call.
_HELD = 64


@dataclass(slots=True)
class IncrementalParser:
    """Parser of the growing text of one answer; returns each piece once.

    Args:
        renderer: of the model.
        tools: available tools.
        prompt_end: the last ids of the prompt.
    """

    renderer: Renderer
    tools: Sequence[ToolSpec]
    prompt_end: Sequence[int]
    reasoning: str = ""
    content: str = ""

    def grown(self, ids: Sequence[int]) -> tuple[str, str]:
        """Return reasoning and content that became final since the last call.

        Args:
            ids: all ids sampled so far.
        """
        if self.renderer.tool_format == "harmony" and _in_header(self.renderer.decode(ids)):
            return "", ""
        turn = self.renderer.parse(ids, self.tools, prompt_ids=self.prompt_end)
        if turn.malformed or turn.tool_calls:
            return "", ""
        return self._more(_sure(turn.reasoning), _sure(turn.content) if turn.content else "")

    def rest(self, turn: AssistantTurn) -> tuple[str, str]:
        """Return the remaining reasoning and content of the complete answer."""
        return self._more(turn.reasoning, turn.content)

    def _more(self, reasoning: str, content: str) -> tuple[str, str]:
        more = ("", "")
        if reasoning.startswith(self.reasoning) and not self.content:
            more = (reasoning[len(self.reasoning) :], "")
            self.reasoning = reasoning
        if content.startswith(self.content):
            more = (more[0], content[len(self.content) :])
            self.content = content
        return more


@dataclass(slots=True)
class LiveAnswer:
    """Answer in progress, between the model server and the client that streams it.

    Args:
        changed: set whenever more was sampled.
        unfolding: its parser; None before the prompt is ready.
        restarted: sampling started anew, on another server.
        partial: all tokens sampled so far; None if the model server does not stream.
    """

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    unfolding: IncrementalParser | None = None
    restarted: bool = False
    partial: Partial | None = None
    _count: int = 0

    def heard(self, partial: Partial) -> None:
        """Receive all tokens sampled so far."""
        self.restarted |= len(partial.ids) < self._count
        self.partial, self._count = partial, len(partial.ids)
        self.changed.set()

    def more(self) -> tuple[str, str]:
        """Return reasoning and content that became final since the last call."""
        if self.unfolding is None or self.restarted or self.partial is None:
            return "", ""
        return self.unfolding.grown(self.partial.ids)

    @property
    def partly_sent(self) -> bool:
        """True if some of the answer was sent to the client."""
        return self.unfolding is not None and bool(self.unfolding.reasoning or self.unfolding.content)


def _in_header(text: str) -> bool:
    """Return True if an answer of gpt-oss ends within a message header, which decodes as plain text."""
    return text.rfind("<|message|>") <= max(text.rfind("<|start|>"), text.rfind("<|end|>"))


def _sure(text: str) -> str:
    """Return the final part of a growing text: without trailing white space, half a character, or a possible
    start of a call."""
    text = text.rstrip().rstrip("\ufffd")
    if text[:1] in _OPENINGS:
        return ""
    for at in range(len(text) - 1, max(-1, len(text) - 1 - _HELD), -1):
        if text[at] in _OPENINGS:
            text = text[:at]
    return text.rstrip()
