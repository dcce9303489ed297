"""Server with a scripted model behind both of OpenAI's interfaces."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastapi import FastAPI, Request

from prorl_envs.env.base import Task
from prorl_envs.testing.openai_face import (
    DONE_TEXT,
    FakeBehaviour,
    FakeCall,
    add_responses,
    body_of,
    next_call,
)
from prorl_envs.tools.types import JsonObject
from tests.support.serving import served


@contextmanager
def scripted_openai(tasks: Sequence[Task]) -> Iterator[str]:
    """Serve the application on the loopback interface while the block runs; yield the URL with `/v1`."""
    with served(face(tasks)) as url:
        yield f"{url}/v1"


def face(tasks: Sequence[Task]) -> FastAPI:
    """Create the application: `POST /v1/responses`, `POST /v1/chat/completions`, `GET /v1/models`."""
    app = FastAPI()
    add_responses(app, tasks)

    @app.get("/v1/models")
    async def models() -> JsonObject:
        return {"object": "list", "data": [{"id": str(name), "object": "model"} for name in FakeBehaviour]}

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> JsonObject:
        body = await body_of(request)
        messages = body.get("messages", [])
        made = sum(1 for message in messages if message.get("role") == "tool")
        return _chat_completion(body, next_call(tasks, body, messages, made), made)

    return app


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
