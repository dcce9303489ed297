"""Episodes without a model: given tool calls and answers, and scripts in the agent's sandbox."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prorl_envs.env.base import Environment, Grade, ReferenceCall, Task
from prorl_envs.env.conversation import MessageLog
from prorl_envs.env.node import Node
from prorl_envs.tools.types import ToolCall

type Step = Callable[[Environment[Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """Graded episode.

    Args:
        grade: the grade.
        refused: a sentence for each call that the tools refused.
        outputs: results of all calls.
    """

    grade: Grade
    refused: tuple[str, ...]
    outputs: tuple[str, ...]


async def play[TaskT: Task](
    family: type[Environment[TaskT]],
    node: Node,
    task: TaskT,
    calls: Sequence[ReferenceCall] = (),
    answer: str = "",
    *,
    before: Step | None = None,
) -> PlayedEpisode:
    """Run one whole episode with the given calls and last answer.

    Args:
        before: called with the environment before the calls.

    Raises:
        RolloutFailure: the episode failed.
    """
    async with family(node) as env:
        conversation = MessageLog(await env.init(task))
        if before is not None:
            await before(env)
        refused, outputs = await make_calls(env, calls, conversation)
        if answer:
            conversation.said(answer)
        env.on_transcript(conversation.messages)
        grade = await env.eval()
        return PlayedEpisode(
            grade=grade,
            refused=tuple(refused),
            outputs=tuple(outputs),
        )


async def make_calls(
    env: Environment[Any], calls: Sequence[ReferenceCall], conversation: MessageLog
) -> tuple[list[str], list[str]]:
    """Make tool calls in a running episode. Return a sentence for each refused one, and all results."""
    refused, outputs = [], []
    for number, step in enumerate(calls, start=1):
        call = ToolCall(id=f"call-{number}", name=step.tool, arguments=dict(step.arguments))
        result = await env.call(call)
        conversation.called(call, result)
        outputs.append(result.text)
        if not result.ok:
            refused.append(f"reference call {number} ({step.tool}) was refused: {result.text[:200]}")
    return refused, outputs
