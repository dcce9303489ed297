"""Token route of a vLLM server with `--enable-scale-out`, whose answers contain weight versions.

The formats are those of vLLM's `entrypoints/scale_out/token_in_token_out`, as far as rollouts need them.
An event contains only new tokens; the last event also contains the versions.
"""

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.testing.scripted_app import ScriptedService
from prorl_envs.tools.types import JsonObject
from tests.support.timed_server import TimedPlayed, add_steerable_vllm, timed


class TokenSampling(BaseModel):
    """Sampling settings that affect a script."""

    model_config = ConfigDict(extra="ignore")

    max_tokens: int = Field(default=16, ge=1)
    stop_token_ids: list[int] = Field(default=[], max_length=1000)


class TokensRequest(BaseModel):
    """Fields of a request that the scripted server uses."""

    model_config = ConfigDict(extra="ignore")

    token_ids: list[int] = Field(min_length=1, max_length=4_000_000)
    sampling_params: TokenSampling = TokenSampling()
    stream: bool = False


def add_generate(app: FastAPI, service: ScriptedService) -> None:
    """Add vLLM's routes and this route to a scripted server."""
    add_steerable_vllm(app, service)
    service = timed(service)

    @app.post("/inference/v1/generate")
    async def generate(body: TokensRequest, request: Request) -> Response:
        params = body.sampling_params
        arguments = (body.token_ids, params.max_tokens, params.stop_token_ids, request)
        if body.stream:
            return await service.stream(*arguments, lambda played, sent: _answer(body, played, sent))
        played = await service.play(*arguments)
        return played if isinstance(played, Response) else JSONResponse(_answer(body, played, 0))


def _answer(body: TokensRequest, played: TimedPlayed, sent: int) -> JsonObject:
    new = played.after(sent)
    pairs = zip(new.ids, new.logprobs, strict=False)
    content = [{"token_id": number, "logprob": value, "top_logprobs": []} for number, value in pairs]
    choice: JsonObject = {
        "index": 0,
        "token_ids": list(new.ids),
        "logprobs": {"content": content},
        "finish_reason": played.finish_reason or None,
        "weight_versions": played.version_spans() if played.finish_reason else None,
    }
    answer: JsonObject = {"request_id": "scripted", "choices": [choice]}
    return answer if sent else {**answer, "prompt_token_ids": body.token_ids}
