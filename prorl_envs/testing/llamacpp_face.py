"""llama.cpp's native interface of the scripted model server.

Routes and formats are those of a real `llama-server` (`tests/llamacpp`), as far as rollouts need them.
"""

import math

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.testing.scripted_app import Played, ScriptedService
from prorl_envs.tools.types import JsonObject


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
    """Make a scripted server answer as llama.cpp does, which supports end-of-turn tokens, but no pauses."""

    @app.post("/completion")
    async def completion(asked: LlamaCppRequest, request: Request) -> Response:
        most = asked.n_predict if asked.n_predict > 0 else service.options.max_model_len - len(asked.prompt)
        asks = (asked.prompt, most, list(service.stop_ids), request)
        if asked.stream:
            return await service.stream(*asks, lambda played, sent: _event(service, asked, played, sent))
        played = await service.play(*asks)
        if isinstance(played, Response):
            return played
        return JSONResponse(_chosen(asked, _answer(service, asked, played)))


def _chosen(asked: LlamaCppRequest, answer: JsonObject) -> JsonObject:
    return {name: answer[name] for name in asked.response_fields or answer if name in answer}


def _event(service: ScriptedService, asked: LlamaCppRequest, played: Played, sent: int) -> JsonObject:
    """Return an event with the tokens not sent before; only the last has a finish reason and the requested
    fields."""
    answer = _answer(service, asked, played.after(sent))
    answer["tokens_predicted"] = len(played.ids)
    if played.finish_reason:
        return _chosen(asked, answer)
    named = ("content", "tokens", "completion_probabilities", "tokens_predicted", "tokens_evaluated")
    return {name: answer[name] for name in named if name in answer} | {"stop": False}


def _answer(service: ScriptedService, asked: LlamaCppRequest, played: Played) -> JsonObject:
    probabilities = [
        {"id": number, "token": service.decode([number]), "prob": math.exp(value), "top_probs": []}
        for number, value in zip(played.ids, played.logprobs, strict=False)
    ]
    answer: JsonObject = {
        "content": service.decode(played.ids),
        "tokens": list(played.ids) if asked.return_tokens else [],
        "stop": True,
        "stop_type": {"stop": "eos", "length": "limit"}.get(played.finish_reason, "none"),
        "truncated": False,
        "tokens_predicted": len(played.ids),
        "tokens_evaluated": len(asked.prompt),
        "tokens_cached": len(asked.prompt) + len(played.ids) - 1,
        "timings": {"cache_n": played.cached, "prompt_n": len(asked.prompt) - played.cached},
    }
    if asked.n_probs:
        answer["completion_probabilities"] = probabilities
    return answer
