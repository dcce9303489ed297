"""Playing a recorded conversation again, without a model, to have it graded by the grader of today.

Its tool calls are made again in a fresh sandbox, in their order, and the grader is told what was said then.
What a call gives may differ from what it gave (times, process ids), and with it the reward: that is counted.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prorl_envs.env.base import Environment, Grade, Message, Task
from prorl_envs.env.harness.family import harness_of
from prorl_envs.env.node import Node
from prorl_envs.errors import InputError
from prorl_envs.tools.types import ToolCall

#: How the agent loop begins the line that it puts in place of what it cut from an observation.
_CUT = "characters left out]"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of it.

    Args:
        grade: of today.
        calls: how many were made again.
        differing: how many of these gave something else than they did then.
    """

    grade: Grade
    calls: int
    differing: int


async def replay[TaskT: Task](
    family: type[Environment[TaskT]],
    node: Node,
    task: TaskT,
    messages: Sequence[Message],
    *,
    offered: Collection[str] = (),
    tool_timeout_s: float | None = None,
) -> Replayed:
    """Play and grade one conversation.

    Args:
        family: the environment class, whose tools are called as they were.
        node: where the episode runs.
        task: the task that it was about.
        messages: as a result holds them: the prompt first.
        offered: names of the tools that were on offer then.
        tool_timeout_s: seconds a call may take; None takes the family's.

    Raises:
        InputError: a message is not what an agent loop writes down, or a tool is not on offer today, or the
            calls were a harness's.
        RolloutFailure: the episode could not be carried through.
    """
    if (harness := harness_of(family)) is not None:
        raise InputError(
            f"the harness {harness.name} worked on it with tools of its own, which are not called again",
            hint="roll it out anew",
        )
    made = differing = 0
    recorded = list(calls_of(messages))
    async with family(node) as environment:
        prompt = await environment.init(task)
        if gone := set(offered) - {tool.name for tool in prompt.tools}:
            raise InputError(
                f"there is no tool {min(gone)!r} today",
                hint="give the settings that it was run with: --config",
            )
        for call, observed in recorded:
            result = await environment.call(call, timeout_s=tool_timeout_s)
            made += 1
            if call.name == environment.finish_tool and result.ok:
                break
            shown = result.text.encode("utf-8", "replace").decode()
            differing += observed is not None and observed != shown and _CUT not in observed
        environment.listen(tuple(messages))
        return Replayed(await environment.eval(), made, differing)


def calls_of(messages: Sequence[Message]) -> Iterator[tuple[ToolCall, str | None]]:
    """The calls of a conversation, each with what it gave; None where that was not shown to the model.

    Raises:
        InputError: names the message that is wrong.
    """
    for number, message in enumerate(messages):
        if message.get("role") != "assistant" or not message.get("tool_calls"):
            continue
        shown = iter(_observations(messages[number + 1 :]))
        if not isinstance(message["tool_calls"], list):
            raise InputError(f"messages.{number}.tool_calls: a list is expected")
        for place, call in enumerate(message["tool_calls"]):
            yield _call(call, f"messages.{number}.tool_calls.{place}"), next(shown, None)


def _observations(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        if message.get("role") != "tool":
            return
        yield str(message.get("content"))


def _call(call: object, where: str) -> ToolCall:
    function: Any = call.get("function") if isinstance(call, Mapping) else None
    try:
        arguments = json.loads(function["arguments"])
        if isinstance(call, Mapping) and isinstance(function["name"], str) and isinstance(arguments, dict):
            return ToolCall(str(call.get("id")), function["name"], arguments)
    except (TypeError, KeyError, ValueError, RecursionError):
        pass
    raise InputError(f"{where}: not a call with a name and arguments in JSON")
