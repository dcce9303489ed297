"""Replay of a recorded conversation without a model, to grade it with the current grader.

The tool calls run again in a fresh sandbox, in their order, and the grader receives the recorded messages.
Results of calls may differ from the recorded ones (times, process ids), so the reward may differ too. The
replay counts the results that differ.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prorl_envs.env.base import Environment, Grade, Message, Task
from prorl_envs.env.harness.family import harness_of
from prorl_envs.errors import InputError
from prorl_envs.strict_json import STRICT_JSON, encodable
from prorl_envs.tools.types import ToolCall

#: Part of the line that the agent loop writes in place of the text that it cut from an observation.
_CUT = "characters left out]"


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay.

    Args:
        grade: verdict of the current grader.
        calls: number of calls that ran again.
        differing: number of these calls whose result differs from the recorded one.
    """

    grade: Grade
    calls: int
    differing: int


async def replay[TaskT: Task](
    environment: Environment[TaskT],
    task: TaskT,
    messages: Sequence[Message],
    *,
    offered: Collection[str] = (),
    tool_timeout_s: float | None = None,
) -> Replayed:
    """Replay and grade one conversation.

    Args:
        environment: a new environment, which is closed at the end.
        task: the task of the conversation.
        messages: all messages of a result, the prompt first.
        offered: names of the tools that were available in the recording.
        tool_timeout_s: seconds a call may take; None takes the family's default.

    Raises:
        InputError: a message does not have the format of the agent loop, a tool of the recording is not
            available, or a harness solved the task.
        RolloutFailure: the episode failed.
    """
    if (harness := harness_of(type(environment))) is not None:
        raise InputError(
            f"the harness {harness.name} used its own tools, whose calls cannot be replayed",
            hint="run the task again",
        )
    calls_made = differing = 0
    recorded = list(calls_of(messages))
    async with environment:
        prompt = await environment.init(task)
        if missing := set(offered) - {tool.name for tool in prompt.tools}:
            raise InputError(
                f"the tool {min(missing)!r} of the recording is not available",
                hint="give the settings of the recorded run: --config",
            )
        for call, observed in recorded:
            result = await environment.call(call, timeout_s=tool_timeout_s)
            calls_made += 1
            if call.name == environment.finish_tool and result.ok:
                break
            model_text = encodable(result.text)
            differing += observed is not None and observed != model_text and _CUT not in observed
        environment.on_transcript(tuple(messages))
        return Replayed(await environment.eval(), calls_made, differing)


def calls_of(messages: Sequence[Message]) -> Iterator[tuple[ToolCall, str | None]]:
    """Yield the calls of a conversation, each with its result; None if the model was not shown the result.
    A call whose arguments are not a JSON object was not executed, and is omitted.

    Raises:
        InputError: names the message that is wrong.
    """
    for number, message in enumerate(messages):
        if message.get("role") != "assistant" or not message.get("tool_calls"):
            continue
        observations = iter(_observations(messages[number + 1 :]))
        if not isinstance(message["tool_calls"], list):
            raise InputError(f"messages.{number}.tool_calls: a list is expected")
        for index, call in enumerate(message["tool_calls"]):
            read, observed = _call(call, f"messages.{number}.tool_calls.{index}"), next(observations, None)
            if read is not None:
                yield read, observed


def _observations(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        if message.get("role") != "tool":
            return
        yield str(message.get("content"))


def _call(call: object, where: str) -> ToolCall | None:
    function: Any = call.get("function") if isinstance(call, Mapping) else None
    name, text = (
        function.get(key) if isinstance(function, Mapping) else None for key in ("name", "arguments")
    )
    if not isinstance(call, Mapping) or not isinstance(name, str) or not isinstance(text, str):
        raise InputError(f"{where}: not a call with a name and arguments")
    try:
        arguments = STRICT_JSON.decode(text or "{}")
    except (ValueError, RecursionError):
        return None
    return ToolCall(str(call.get("id")), name, arguments) if isinstance(arguments, dict) else None
