"""Scripted model behind OpenAI's two interfaces, with which NeMo Gym calls a model.

There is no model. The server finds the task by its instruction in the prompt, and returns the task's
reference tool calls, one per turn. The `model` field of a request selects the behaviour:

    reference   return the reference calls, then a closing text
    nothing     return the closing text immediately
    malformed   first return a call whose arguments are not JSON, then continue as `reference`
    unknown     first return a call of a tool that does not exist, then continue as `reference`
    endless     return the first reference call in every turn
    error       answer HTTP 500

The server is stateless: it determines the next answer from the conversation in the request.
"""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from prorl_envs.env.base import Task
from prorl_envs.model.types import AssistantTurn
from prorl_envs.rollout.endpoint.chat import ChatCompletions
from prorl_envs.rollout.endpoint.responses import Responses
from prorl_envs.rollout.endpoint.types import EndpointAnswer, EndpointRequest, RequestRefused
from prorl_envs.tools.types import ToolCall

DONE_TEXT = "Done."
UNKNOWN_TOOL = "no_such_tool"
#: Arguments of a malformed call, and the text that replaces them in an answer: not JSON.
_MARK, _NO_JSON = {"malformed": True}, '{"command": '


class FakeBehaviour(StrEnum):
    """Behaviour of the scripted model; see the module's description."""

    REFERENCE = "reference"
    NOTHING = "nothing"
    MALFORMED = "malformed"
    UNKNOWN = "unknown"
    ENDLESS = "endless"
    ERROR = "error"


def add_conversations(app: FastAPI, tasks: Sequence[Task]) -> None:
    """Add the routes by which NeMo Gym's `openai_model` and `vllm_model` call a model."""

    async def answer(shape: ChatCompletions | Responses, request: Request) -> Any:
        try:
            asked = shape.read(await request.body())
        except RequestRefused as refusal:
            raise HTTPException(refusal.status, refusal.message) from refusal
        made = sum(message["role"] == "tool" for message in asked.messages)
        calls = _next_calls(tasks, asked, made)
        turn = AssistantTurn("" if calls else DONE_TEXT, calls, ())
        text = json.dumps(shape.write(EndpointAnswer(made, turn, "stop", 0, 0), asked))
        return json.loads(text.replace(json.dumps(json.dumps(_MARK)), json.dumps(_NO_JSON)))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        return await answer(ChatCompletions(), request)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Any:
        return await answer(Responses(), request)


def _next_calls(tasks: Sequence[Task], asked: EndpointRequest, made: int) -> tuple[ToolCall, ...]:
    """Return the next call of the script, or none.

    Args:
        made: number of tool results in the conversation.
    """
    try:
        behaviour = FakeBehaviour(asked.model)
    except ValueError as error:
        raise HTTPException(404, f"no such model: one of {', '.join(FakeBehaviour)}") from error
    if behaviour is FakeBehaviour.ERROR:
        raise HTTPException(500, "the scripted model fails because the request names the model 'error'")
    prompt = "\n".join(message["content"] for message in asked.messages if message["role"] == "user")
    found = [task for task in tasks if task.instruction.strip() in prompt]
    if not found:
        raise HTTPException(400, "the prompt contains the instruction of no known task")
    # A shorter instruction may be a prefix of the right one.
    script = _script(max(found, key=lambda task: len(task.instruction)), behaviour)
    number = 0 if behaviour is FakeBehaviour.ENDLESS else made
    return tuple(ToolCall(f"call_{made}", *call) for call in script[number : number + 1])


def _script(task: Task, behaviour: FakeBehaviour) -> list[tuple[str, dict[str, Any]]]:
    """Return the tool and the arguments of each call."""
    reference = [(call.tool, call.arguments) for call in task.reference]
    match behaviour:
        case FakeBehaviour.NOTHING:
            return []
        case FakeBehaviour.MALFORMED:
            return [(reference[0][0] if reference else UNKNOWN_TOOL, _MARK), *reference]
        case FakeBehaviour.UNKNOWN:
            return [(UNKNOWN_TOOL, {}), *reference]
        case _:
            return reference
