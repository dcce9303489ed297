"""Scripted model behind OpenAI's two interfaces, with which NeMo Gym calls a model.

There is no model. The server finds the task by its instruction in the prompt, and returns the task's
reference tool calls, one per turn, then a closing text. It is stateless: it determines the next answer from
the conversation in the request.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from prorl_envs.env.base import Task
from prorl_envs.model.types import AssistantTurn
from prorl_envs.rollout.endpoint.chat import ChatCompletions
from prorl_envs.rollout.endpoint.responses import Responses
from prorl_envs.rollout.endpoint.types import EndpointAnswer, EndpointRequest, RequestRefused
from prorl_envs.tools.types import ToolCall

DONE_TEXT = "Done."


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
        return shape.write(EndpointAnswer(made, turn, "stop", 0, 0), asked)

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
    prompt = "\n".join(message["content"] for message in asked.messages if message["role"] == "user")
    found = [task for task in tasks if task.instruction.strip() in prompt]
    if not found:
        raise HTTPException(400, "the prompt contains the instruction of no known task")
    # A shorter instruction may be a prefix of the right one.
    script = max(found, key=lambda task: len(task.instruction)).reference
    return tuple(ToolCall(f"call_{made}", call.tool, call.arguments) for call in script[made : made + 1])
