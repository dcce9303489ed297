"""An answer read while it is sampled: what of its text can be told already, for it stays as it is.

What might yet turn out to be a tool call, or the beginning of a control token's text, is held back until
more has come. Tool calls are told when the answer is whole: until then they are not known to be readable.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from prorl_envs.policy.types import AssistantTurn, Partial, Renderer
from prorl_envs.tools.types import ToolSpec

#: What a call, in any of the forms that are known here, may begin with.
_OPENINGS = "<[{"
#: Characters behind such a sign after which it was none.
_HELD = 64


@dataclass(slots=True)
class Unfolding:
    """Tells the growing text of one answer, each piece once.

    Args:
        renderer: of the model.
        tools: on offer.
        prompt_end: the last ids of the prompt.
    """

    renderer: Renderer
    tools: Sequence[ToolSpec]
    prompt_end: Sequence[int]
    reasoning: str = ""
    content: str = ""

    def grown(self, ids: Sequence[int]) -> tuple[str, str]:
        """What can be told by now, beside what was: reasoning, content.

        Args:
            ids: all that was sampled by now.
        """
        if self.renderer.tool_format == "harmony" and _in_header(self.renderer.decode(ids)):
            return "", ""
        turn = self.renderer.parse(ids, self.tools, prompt_ids=self.prompt_end)
        if turn.malformed or turn.tool_calls:
            return "", ""
        return self._more(_sure(turn.reasoning), _sure(turn.content) if turn.content else "")

    def rest(self, turn: AssistantTurn) -> tuple[str, str]:
        """What is left to tell of the whole answer."""
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
class Live:
    """An answer on its way from the model's server to whoever is told of it.

    Args:
        changed: set whenever more was sampled.
        unfolding: reads it; None before the prompt is ready.
        restarted: its sampling began anew, on another server.
        partial: what is sampled by now; None where the model's server does not say.
    """

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    unfolding: Unfolding | None = None
    restarted: bool = False
    partial: Partial | None = None
    _count: int = 0

    def heard(self, partial: Partial) -> None:
        """All that was sampled by now."""
        self.restarted |= len(partial.ids) < self._count
        self.partial, self._count = partial, len(partial.ids)
        self.changed.set()

    def more(self) -> tuple[str, str]:
        """What can be told now, and was not: reasoning, content."""
        if self.unfolding is None or self.restarted or self.partial is None:
            return "", ""
        return self.unfolding.grown(self.partial.ids)

    @property
    def told(self) -> bool:
        """Some of it was."""
        return self.unfolding is not None and bool(self.unfolding.reasoning or self.unfolding.content)


def _in_header(text: str) -> bool:
    """Whether a growing answer of gpt-oss is in the header of a message, which is plain text there."""
    return text.rfind("<|message|>") <= max(text.rfind("<|start|>"), text.rfind("<|end|>"))


def _sure(text: str) -> str:
    """The part of a growing text that will stay: without white space at its end, half a character, or what
    may become a call."""
    text = text.rstrip().rstrip("\ufffd")
    if text[:1] in _OPENINGS:
        return ""
    for at in range(len(text) - 1, max(-1, len(text) - 1 - _HELD), -1):
        if text[at] in _OPENINGS:
            text = text[:at]
    return text.rstrip()
