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
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from prorl_envs.env.base import Task
from prorl_envs.tools.types import JsonObject

DONE_TEXT = "Done."
MALFORMED_ARGUMENTS = '{"command": '
UNKNOWN_TOOL = "no_such_tool"


class FakeBehaviour(StrEnum):
    """Behaviour of the scripted model; see the module's description."""

    REFERENCE = "reference"
    NOTHING = "nothing"
    MALFORMED = "malformed"
    UNKNOWN = "unknown"
    ENDLESS = "endless"
    ERROR = "error"


type FakeCall = tuple[str, str]
"""Tool, and arguments in JSON. None instead of a call is the closing text."""


def add_conversations(app: FastAPI, tasks: Sequence[Task]) -> None:
    """Add the routes by which NeMo Gym's `openai_model` and `vllm_model` call a model."""

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> JsonObject:
        body = await _body(request)
        messages = body.get("messages", [])
        made = sum(1 for message in messages if message.get("role") == "tool")
        return _chat_completion(body, _next_call(tasks, body, messages, made), made)

    @app.post("/v1/responses")
    async def responses(request: Request) -> JsonObject:
        body = await _body(request)
        conversation = body.get("input", [])
        if isinstance(conversation, str):
            conversation = [{"role": "user", "content": conversation}]
        made = sum(1 for item in conversation if item.get("type") == "function_call_output")
        return _response(body, _next_call(tasks, body, conversation, made), made)


async def _body(request: Request) -> JsonObject:
    """Return the body of a request, or answer 400 if it is not a JSON object."""
    try:
        body = await request.json()
    except ValueError as error:
        raise HTTPException(400, f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise HTTPException(400, "not a JSON object")
    return body


def _next_call(
    tasks: Sequence[Task], body: Mapping[str, Any], items: Sequence[Mapping[str, Any]], calls_made: int
) -> FakeCall | None:
    """Return the next call of the script.

    Args:
        items: messages of the request.
        calls_made: number of tool results in the conversation.
    """
    try:
        behaviour = FakeBehaviour(body.get("model", ""))
    except ValueError as error:
        raise HTTPException(404, f"no such model: one of {', '.join(FakeBehaviour)}") from error
    if behaviour is FakeBehaviour.ERROR:
        raise HTTPException(500, "the scripted model fails because the request names the model 'error'")
    prompt = "\n".join(_text(item.get("content")) for item in items if item.get("role") == "user")
    found = [task for task in tasks if task.instruction.strip() in prompt]
    if not found:
        raise HTTPException(400, "the prompt contains the instruction of no known task")
    # A shorter instruction may be a prefix of the right one.
    script = _script(max(found, key=lambda task: len(task.instruction)), behaviour)
    if behaviour is FakeBehaviour.ENDLESS and script:
        return script[0]
    return script[calls_made] if calls_made < len(script) else None


def _script(task: Task, behaviour: FakeBehaviour) -> list[FakeCall]:
    reference = [(call.tool, json.dumps(call.arguments)) for call in task.reference]
    match behaviour:
        case FakeBehaviour.NOTHING:
            return []
        case FakeBehaviour.MALFORMED:
            first = reference[0][0] if reference else UNKNOWN_TOOL
            return [(first, MALFORMED_ARGUMENTS), *reference]
        case FakeBehaviour.UNKNOWN:
            return [(UNKNOWN_TOOL, "{}"), *reference]
        case _:
            return reference


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _response(body: JsonObject, call: FakeCall | None, turn: int) -> JsonObject:
    if call:
        tool, arguments = call
        item: JsonObject = {
            "type": "function_call",
            "id": f"fc_{turn}",
            "call_id": f"call_{turn}",
            "name": tool,
            "arguments": arguments,
            "status": "completed",
        }
    else:
        content = {"type": "output_text", "text": DONE_TEXT, "annotations": []}
        item = {
            "type": "message",
            "id": f"msg_{turn}",
            "role": "assistant",
            "status": "completed",
            "content": [content],
        }
    return {
        "id": f"resp_{turn}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed",
        "model": body["model"],
        "output": [item],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
        },
    }


def _chat_completion(body: JsonObject, call: FakeCall | None, turn: int) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": None if call else DONE_TEXT}
    if call:
        tool, arguments = call
        function = {"name": tool, "arguments": arguments}
        message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
    reason = "tool_calls" if call else "stop"
    return {
        "id": f"chatcmpl-{turn}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body["model"],
        "choices": [{"index": 0, "finish_reason": reason, "message": message}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
