"""Continuation of a conversation after an answer: append, or fork if its history is rewritten.

Sampled ids are never changed. New ids are appended to them if the result has the same text as the rendered
conversation. If the template writes the history differently (it drops earlier reasoning, or writes a call
differently from the sampled one), the conversation restarts from the rendered ids, in a new row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Reasoning, Sampled
from prorl_envs.tools.types import ToolSpec


@dataclass(frozen=True, slots=True)
class Append:
    """Ids to append to the context."""

    ids: list[int]


@dataclass(frozen=True, slots=True)
class Fork:
    """Ids of a prompt that replaces the context."""

    ids: list[int]


def next_prompt(
    renderer: TemplateRenderer,
    reasoning: Reasoning,
    context: Sequence[int],
    sampled: Sampled,
    messages: Sequence[dict[str, Any]],
    observations: int,
    tools: Sequence[ToolSpec],
) -> Append | Fork:
    """Return the next prompt of a conversation.

    Args:
        renderer: renderer of the model.
        reasoning: whether the template may rewrite the history, and when.
        context: all ids so far, including the answer.
        sampled: the answer.
        messages: the conversation, including the new messages.
        observations: number of new messages, which are the last of `messages`.
        tools: the offered tools.

    Raises:
        InputError: the template refuses the observations.
    """
    new = messages[len(messages) - observations :]
    bridge = renderer.bridge(sampled, new)
    if reasoning == "keep" or (reasoning == "user_turn" and all(m.get("role") != "user" for m in new)):
        return Append(bridge)
    try:
        rendered = renderer.prompt(messages, tools)
    except InputError:  # the template refuses the history, but the sampled ids can still be extended
        return Append(bridge)
    if renderer.decode(rendered) == renderer.decode([*context, *bridge]):
        return Append(bridge)
    return Fork(rendered)
