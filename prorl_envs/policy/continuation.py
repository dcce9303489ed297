"""How a conversation goes on after an answer: appended to, or forked where its history is rewritten.

Sampled ids are appended to wherever that says what the template says; they are never changed. Where the
template writes the history differently (it drops earlier reasoning, or writes a call in another way than it
was sampled), the conversation begins anew from the template's ids, in a row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.policy.types import Reasoning, Renderer, Sampled
from prorl_envs.tools.types import ToolSpec


@dataclass(frozen=True, slots=True)
class Append:
    """Ids that go behind all that there is."""

    ids: list[int]


@dataclass(frozen=True, slots=True)
class Fork:
    """Ids of a prompt that takes the place of all that there is."""

    ids: list[int]


def next_prompt(
    renderer: Renderer,
    reasoning: Reasoning,
    context: Sequence[int],
    sampled: Sampled,
    messages: Sequence[dict[str, Any]],
    observations: int,
    tools: Sequence[ToolSpec],
) -> Append | Fork:
    """The next prompt of a conversation.

    Args:
        renderer: of the model.
        reasoning: whether the template may rewrite the history, and when.
        context: everything so far, ids, the answer included.
        sampled: the answer.
        messages: the conversation with what comes next.
        observations: how many of the messages come next, from the end.
        tools: those on offer.

    Raises:
        InputError: the template refuses the observations.
    """
    new = messages[len(messages) - observations :]
    bridge = renderer.bridge(sampled, new)
    if reasoning == "keep" or (reasoning == "user_turn" and all(m.get("role") != "user" for m in new)):
        return Append(bridge)
    try:
        rendered = renderer.prompt(messages, tools)
    except (
        InputError
    ):  # a history it would not write itself: what was sampled can be gone on from all the same
        return Append(bridge)
    if renderer.decode(rendered) == renderer.decode([*context, *bridge]):
        return Append(bridge)
    return Fork(rendered)
