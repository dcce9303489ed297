"""SGLang's native interface of the scripted model server.

Routes and formats are those of https://docs.sglang.io/basic_usage/native_api.html as far as rollouts need
them.
"""

from typing import Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.testing.scripted_app import MODEL_ID, ScriptedService
from prorl_envs.tools.types import JsonObject
from tests.support.timed_server import NewVersion, TimedPlayed, TimedService, Treatment, timed


class SamplingParams(BaseModel):
    """Sampling settings that affect a script."""

    model_config = ConfigDict(extra="ignore")

    max_new_tokens: int = Field(default=128, ge=1)
    stop_token_ids: list[int] = Field(default=[], max_length=1000)
    stream_interval: int = Field(default=1, ge=1)


class GenerateRequest(BaseModel):
    """Fields of a request that the scripted server uses."""

    model_config = ConfigDict(extra="ignore")

    input_ids: list[int] = Field(min_length=1, max_length=4_000_000)
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = False
    stream: bool = False
    rid: str = ""


class AbortRequest(BaseModel):
    rid: str = ""


class SglangPauseRequest(BaseModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


def add_sglang(app: FastAPI, service: ScriptedService, *, incremental: bool = False) -> None:
    """Add SGLang's routes to a scripted server.

    Args:
        incremental: stream events contain only new tokens, as with `--incremental-streaming-output`.
    """
    service = timed(service)
    engine = service.engine

    @app.post("/generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        params = body.sampling_params
        arguments = (body.input_ids, params.max_new_tokens, params.stop_token_ids, request)
        if body.stream:

            def piece(played: TimedPlayed, sent: int) -> JsonObject:
                new = played.after(sent) if incremental else played
                return _answer(service, body, new, len(played.ids))

            return await service.stream(*arguments, piece, rid=body.rid, interval=params.stream_interval)
        played = await service.play(*arguments, rid=body.rid)
        if isinstance(played, Response):
            return played
        return JSONResponse(_answer(service, body, played, len(played.ids)))

    @app.get("/get_server_info")
    async def get_server_info() -> JsonObject:
        return {"model_path": MODEL_ID, "incremental_streaming_output": incremental}

    @app.get("/get_model_info")
    async def get_model_info() -> JsonObject:
        return {"model_path": MODEL_ID, "is_generation": True, "weight_version": engine.version}

    @app.post("/abort_request")
    async def abort_request(body: AbortRequest) -> Response:
        engine.abort(body.rid)
        service.told_to_abort()
        return Response()

    if not engine.steerable:
        return

    @app.post("/pause_generation")
    async def pause_generation(body: SglangPauseRequest) -> JsonObject:
        treatment: Treatment = "abort" if body.mode == "abort" else "freeze"
        engine.pause(treatment, body.mode)
        return {"status": "ok"}

    @app.post("/continue_generation")
    async def continue_generation() -> JsonObject:
        engine.resume()
        return {"status": "ok"}

    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        service.counts.emptied += 1
        return Response("Cache flushed.")

    @app.post("/update_weight_version")
    async def update_weight_version(body: NewVersion) -> JsonObject:
        engine.version = body.new_version
        return {"success": True}


def _answer(service: TimedService, body: GenerateRequest, played: TimedPlayed, total: int) -> JsonObject:
    """Return an answer or a stream event; `total` is the number of tokens sampled so far."""
    pairs = [[value, number, None] for value, number in zip(played.logprobs, played.ids, strict=False)]
    reason: JsonObject | None = {"type": played.finish_reason} if played.finish_reason else None
    if reason is not None and played.finish_reason == "stop" and played.ids:
        reason["matched"] = played.ids[-1]
    meta: JsonObject = {
        "id": body.rid,
        "finish_reason": reason,
        "prompt_tokens": len(body.input_ids),
        "completion_tokens": total,
        "cached_tokens": played.cached,
        "weight_version": played.version,
    }
    if reason is not None:
        meta["weight_versions"] = played.version_spans()
    if body.return_logprob:
        meta["output_token_logprobs"] = pairs
    return {"text": service.decode(played.ids), "output_ids": list(played.ids), "meta_info": meta}
