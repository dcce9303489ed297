"""llama.cpp's native interface of the scripted model server.

Routes and formats are those of a real `llama-server` (`tests/llamacpp`), as far as rollouts need them.
"""

import math

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.testing.scripted_app import Played, ScriptedService
from prorl_envs.tools.types import JsonObject
from tests.support.timed_server import TimedPlayed, timed


class LlamaCppRequest(BaseModel):
    """Fields of a request that the scripted server uses."""

    model_config = ConfigDict(extra="ignore")

    prompt: list[int] = Field(min_length=1, max_length=4_000_000)
    n_predict: int = Field(default=-1, ge=-1)
    n_probs: int = 0
    return_tokens: bool = False
    stream: bool = False
    response_fields: list[str] = []


def add_llamacpp(app: FastAPI, service: ScriptedService) -> None:
    """Add llama.cpp's routes to a scripted server; they have no pauses."""
    service = timed(service)

    @app.post("/completion")
    async def completion(body: LlamaCppRequest, request: Request) -> Response:
        limit = body.n_predict if body.n_predict > 0 else service.options.max_model_len - len(body.prompt)
        arguments = (body.prompt, limit, list(service.stop_ids), request)
        if body.stream:
            return await service.stream(*arguments, lambda played, sent: _event(service, body, played, sent))
        played = await service.play(*arguments)
        if isinstance(played, Response):
            return played
        return JSONResponse(_requested_fields(body, _answer(service, body, played)))


def _requested_fields(body: LlamaCppRequest, answer: JsonObject) -> JsonObject:
    return {name: answer[name] for name in body.response_fields or answer if name in answer}


def _event(service: ScriptedService, body: LlamaCppRequest, played: TimedPlayed, sent: int) -> JsonObject:
    """Return an event with the tokens that were not sent before. Only the last event contains a finish reason
    and the fields that the request names."""
    answer = _answer(service, body, played.after(sent))
    answer["tokens_predicted"] = len(played.ids)
    if played.finish_reason:
        return _requested_fields(body, answer)
    fields = ("content", "tokens", "completion_probabilities", "tokens_predicted", "tokens_evaluated")
    return {name: answer[name] for name in fields if name in answer} | {"stop": False}


def _answer(service: ScriptedService, body: LlamaCppRequest, played: Played) -> JsonObject:
    probabilities = [
        {"id": number, "token": service.decode([number]), "prob": math.exp(value), "top_probs": []}
        for number, value in zip(played.ids, played.logprobs, strict=False)
    ]
    answer: JsonObject = {
        "content": service.decode(played.ids),
        "tokens": list(played.ids) if body.return_tokens else [],
        "stop": True,
        "stop_type": {"stop": "eos", "length": "limit"}.get(played.finish_reason, "none"),
        "truncated": False,
        "tokens_predicted": len(played.ids),
        "tokens_evaluated": len(body.prompt),
        "tokens_cached": len(body.prompt) + len(played.ids) - 1,
        "timings": {"cache_n": played.cached, "prompt_n": len(body.prompt) - played.cached},
    }
    if body.n_probs:
        answer["completion_probabilities"] = probabilities
    return answer
