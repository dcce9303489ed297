"""Routes of the scripted model server; `server.py` runs them."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.testing.scripted import (
    Behaviour,
    Dealer,
    Mix,
    PromptReader,
    ScriptBook,
    ScriptedCounts,
    ScriptedModel,
    ScriptedSample,
)
from prorl_envs.tools.types import JsonObject

MODEL_ID = "scripted"
#: Last event of a stream.
END = "data: [DONE]\n\n"
OWNER = "prorl-envs scripted model server (not a model)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedOptions:
    """Options of the server.

    Args:
        mix: behaviours of the sessions of each task.
        unknown: behaviour for prompts without a known task, such as a probe; None takes it from `mix`.
        seed: seed of the decks, the log-probabilities and all other random choices.
        noncanonical: probability that a token is replaced by two tokens of the same text.
        max_model_len: largest number of tokens of prompt and answer; a longer request is answered with 400.
        owner: owner of the model in the list of models.
    """

    mix: Mix = Mix({Behaviour.SOLVE: 1})  # noqa: RUF009  (frozen)
    unknown: StrEnum | None = None
    seed: int = 0
    noncanonical: float = 0.0
    max_model_len: int = 131_072
    owner: str = OWNER


class CompletionRequest(BaseModel):
    """Fields of a completion request that the scripted server uses. It ignores other fields, because sampling
    settings do not affect a script."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: list[int] = Field(min_length=1, max_length=4_000_000)
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0)
    stop_token_ids: list[int] = Field(default=[], max_length=1000)
    stream: bool = False
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class Played:
    """One answer, before conversion to a protocol's format.

    Args:
        ids: sampled token ids.
        logprobs: one log-probability per id.
        finish_reason: reason of the end; empty during sampling.
        cached: number of tokens at the start of the prompt that are in the prefix cache.
        version: version of the weights that sampled the last token.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    cached: int = 0
    version: str = "scripted-0"


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """One request whose answer is known.

    Args:
        session: its session; `behaviour`: the session's behaviour.
        number: number of assistant turns in the prompt.
        earlier: number of ids that an aborted request of this turn has got; `sample` comes after them.
    """

    session: str
    behaviour: StrEnum
    number: int
    prompt_ids: list[int]
    earlier: int
    sample: ScriptedSample


class ScriptedService:
    """Implementation of the routes.

    Args:
        renderer: tokenizer and template of the simulated model.
        book: scripts of the known tasks.
        options: options of the server.
    """

    counters: type[ScriptedCounts] = ScriptedCounts

    def __init__(self, renderer: TemplateRenderer, book: ScriptBook, options: ScriptedOptions) -> None:
        self.options = options
        self.counts = self.counters()
        self._renderer = renderer
        self._book = book
        self._reader = PromptReader(renderer)
        self._model = ScriptedModel(renderer, book, seed=options.seed, noncanonical=options.noncanonical)
        self._dealer = Dealer(options.mix, self.counts, seed=options.seed)

    @property
    def stop_ids(self) -> Sequence[int]:
        """End-of-turn ids of the simulated model."""
        return self._renderer.stop_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text."""
        return self._renderer.decode(ids)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Answer one completion request as vLLM does, with the session's behaviour."""
        played = await self.play(body.prompt, body.max_tokens, body.stop_token_ids, request)
        if isinstance(played, Response):
            return played
        answer = self.answer(body, played)
        if not body.stream:
            return JSONResponse(answer)
        return StreamingResponse(iter((event(answer), END)), media_type="text/event-stream")

    async def play(
        self, prompt_ids: list[int], max_tokens: int, stop_ids: list[int], request: Request
    ) -> Response | Played:
        """Answer one request with the session's behaviour: return the sample, or the response of a failure.
        The tests have a service with more kinds of failure, and with a speed, pauses and aborts."""
        turn = await self._begin(prompt_ids, max_tokens, stop_ids, request)
        if isinstance(turn, Response):
            return turn
        self.counts.sampled_tokens += len(turn.sample.ids)
        return Played(turn.sample.ids, turn.sample.logprobs, turn.sample.finish_reason)

    async def _begin(
        self, prompt_ids: list[int], max_tokens: int, stop_ids: list[int], request: Request
    ) -> Response | ScriptedTurn:
        prompt = self._reader.read(prompt_ids)
        key = self._book.find(prompt.first_user) or self._book.find(prompt.users)
        session, number = request.headers.get("x-session-id") or f"task:{key or ''}", prompt.assistant_turns
        fixed = self.options.unknown if key is None else None
        behaviour = fixed or self._dealer.deal(session, key or "")
        self.counts.requests += 1
        self.counts.prompt_tokens += len(prompt_ids)
        self.counts.unknown_tasks += key is None
        if (refusal := self._refusal(prompt_ids, max_tokens)) is not None:
            return refusal
        if (fault := await self._fault(behaviour, session, number, prompt_ids, request)) is not None:
            return fault
        earlier = self._sampled_before(session, len(prompt_ids))
        sample = self._model.sample(key, behaviour, number, session=session, max_tokens=earlier + max_tokens)
        sample = sample.after(earlier).until(stop_ids)
        return ScriptedTurn(session, behaviour, number, prompt_ids, earlier, sample)

    def _sampled_before(self, session: str, prompt_length: int) -> int:
        """Return the number of ids of this turn that an aborted request has got."""
        return 0

    def _refusal(self, prompt_ids: list[int], max_tokens: int) -> Response | None:
        if len(prompt_ids) + max_tokens <= self.options.max_model_len:
            if min(prompt_ids) >= 0 and max(prompt_ids) < self._renderer.vocab_size:
                return None
            return error(400, "the prompt contains ids outside the vocabulary")
        limit = self.options.max_model_len
        return error(400, f"prompt and max_tokens exceed the model's maximum context length of {limit}")

    async def _fault(
        self, behaviour: StrEnum, session: str, turn: int, prompt_ids: list[int], request: Request
    ) -> Response | None:
        """Return the response of a failure that the behaviour wants in this turn, or None."""
        if behaviour is not Behaviour.ERROR500:
            return None
        return error(500, "the scripted server fails because of the behaviour error500")

    def metrics(self) -> dict[str, int]:
        """Return the counters; those that vLLM also has get vLLM's names."""
        return {
            "vllm:prompt_tokens_total": self.counts.prompt_tokens,
            "vllm:generation_tokens_total": self.counts.sampled_tokens,
            "scripted:requests_total": self.counts.requests,
        }

    def answer(self, body: CompletionRequest, played: Played) -> JsonObject:
        """Return an answer as vLLM does."""
        ids, logprobs = list(played.ids), list(played.logprobs)
        choice: JsonObject = {
            "index": 0,
            "text": self.decode(ids),
            "finish_reason": played.finish_reason,
            "stop_reason": ids[-1] if ids and played.finish_reason == "stop" else None,
            "logprobs": None,
        }
        if body.logprobs is not None:
            tokens = [self.decode([number]) for number in ids]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None}
        if body.return_token_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": body.prompt}
        usage = {"prompt_tokens": len(body.prompt), "completion_tokens": len(ids)}
        details = {"cached_tokens": played.cached}
        return {
            "id": f"cmpl-scripted-{self.counts.requests}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": MODEL_ID,
            "choices": [choice],
            "usage": {**usage, "total_tokens": sum(usage.values()), "prompt_tokens_details": details},
            "weight_version": played.version,
        }


def add_vllm(app: FastAPI, service: ScriptedService) -> None:
    """Add vLLM's routes to a scripted server."""

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.complete(body, request)


def add_common(app: FastAPI, service: ScriptedService) -> None:
    """Add the routes that all kinds of server have."""

    @app.get("/v1/models")
    async def models() -> JsonObject:
        model = {
            "id": MODEL_ID,
            "object": "model",
            "owned_by": service.options.owner,
            "max_model_len": service.options.max_model_len,
        }
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse("".join(f"{name} {value}\n" for name, value in service.metrics().items()))


def event(data: JsonObject) -> str:
    """Return one event of a stream."""
    return f"data: {json.dumps(data)}\n\n"


def error(status: int, message: str, *, retry_after: int | None = None) -> Response:
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    body = {"error": {"message": message, "type": "scripted", "code": status}}
    return JSONResponse(body, status_code=status, headers=headers)
