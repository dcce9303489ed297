"""The routes of the scripted model server; `server.py` runs them."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from prorl_envs.clock import Clock
from prorl_envs.policy.rendering import TemplateRenderer
from prorl_envs.testing.audit import Audit, Counts, Dealer, Exchange
from prorl_envs.testing.scripted import (
    Behaviour,
    Mix,
    PromptReader,
    ScriptBook,
    ScriptedModel,
    ScriptedSample,
)
from prorl_envs.tools.types import JsonObject

MODEL_ID = "scripted"
# Sessions whose first failure is remembered; the oldest are forgotten, and fail once more.
_MAX_FLAKED = 65_536
OWNER = "prorl-envs scripted model server (not a model)"


class Dialect(StrEnum):
    """Where an answer carries the sampled ids: as vLLM does now, as it did earlier, or not at all."""

    TOKEN_IDS = "token_ids"
    TOKEN_STRINGS = "token_strings"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedOptions:
    """How the server behaves.

    Args:
        mix: behaviours dealt to the sessions of each task.
        unknown: behaviour where a prompt is of no known task, such as a probe; None deals it from the mix.
        seed: of the decks, the log-probabilities and everything else random.
        noncanonical: probability that a token is sampled as two of the same text.
        latency_s: seconds before each answer; tokens_per_s: sampling speed, None is instant.
        max_model_len: most tokens of prompt and answer; more is refused with 400, as vLLM does.
        weight_version: named in every answer.
        dialect: where answers carry the sampled ids.
    """

    mix: Mix = Mix({Behaviour.SOLVE: 1})  # noqa: RUF009  (frozen)
    unknown: Behaviour | None = None
    seed: int = 0
    noncanonical: float = 0.0
    latency_s: float = 0.0
    tokens_per_s: float | None = None
    max_model_len: int = 131_072
    weight_version: str = "scripted-0"
    dialect: Dialect = Dialect.TOKEN_IDS


class CompletionRequest(BaseModel):
    """The fields of a completion request that the scripted server heeds; the rest is ignored, as sampling
    settings mean nothing to a script."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: list[int] = Field(min_length=1, max_length=4_000_000)
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class _Disconnect(Response):
    """Begins an answer and breaks off: uvicorn closes a connection whose answer is left unfinished."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"choices": [', "more_body": True})


class ScriptedService:
    """What the routes call.

    Args:
        renderer: tokenizer and template of the model it plays.
        book: the tasks it knows.
        options: how it behaves.
        clock: of the latency.
    """

    def __init__(
        self, renderer: TemplateRenderer, book: ScriptBook, options: ScriptedOptions, clock: Clock
    ) -> None:
        self.options = options
        self.counts = Counts()
        self.audit = Audit(self.counts)
        self._renderer = renderer
        self._book = book
        self._clock = clock
        self._reader = PromptReader(renderer)
        self._model = ScriptedModel(renderer, book, seed=options.seed, noncanonical=options.noncanonical)
        self._dealer = Dealer(options.mix, self.counts, seed=options.seed)
        self._flaked: dict[str, int] = {}
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[Counts], bool]) -> None:
        """Return once the counts are so."""
        while not holds(self.counts):
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def complete(self, asked: CompletionRequest, request: Request) -> Response:
        """Answer one completion request, in the way its session is dealt."""
        self.counts.running += 1
        self._notify()
        try:
            return await self._complete(asked, request)
        finally:
            self.counts.running -= 1
            self._notify()

    async def _complete(self, asked: CompletionRequest, request: Request) -> Response:
        prompt = self._reader.read(asked.prompt)
        key = self._book.find(prompt.first_user)
        session = request.headers.get("x-session-id") or f"task:{key or ''}"
        undealt = self.options.unknown if key is None else None
        behaviour = undealt or self._dealer.deal(session, key or "")
        self.counts.requests += 1
        self.counts.prompt_tokens += len(asked.prompt)
        self.counts.unknown_tasks += key is None
        self.audit.check(session, asked.prompt, prompt.assistant_turns)
        if (refusal := self._refusal(asked)) is not None:
            return refusal
        if (fault := await self._fault(behaviour, session, prompt.assistant_turns, request)) is not None:
            return fault
        sample = self._model.sample(
            key, behaviour, prompt.assistant_turns, session=session, max_tokens=asked.max_tokens
        )
        if not await self._take_time(sample, request):
            return _nobody_reads_it()
        self.counts.sampled_tokens += len(sample.ids)
        self.audit.record(
            Exchange(
                session,
                behaviour.value,
                prompt.assistant_turns,
                tuple(asked.prompt),
                sample.ids,
                sample.finish_reason,
            )
        )
        return JSONResponse(self._answer(asked, sample, behaviour, random.Random(session)))

    def _refusal(self, asked: CompletionRequest) -> Response | None:
        if len(asked.prompt) + asked.max_tokens <= self.options.max_model_len:
            if min(asked.prompt) >= 0 and max(asked.prompt) < self._renderer.vocab_size:
                return None
            return _error(400, "the prompt holds ids outside the vocabulary")
        limit = self.options.max_model_len
        return _error(400, f"prompt and max_tokens exceed the model's maximum context length of {limit}")

    async def _fault(
        self, behaviour: Behaviour, session: str, turn: int, request: Request
    ) -> Response | None:
        match behaviour:
            case Behaviour.HANG | Behaviour.HANG_LATER if turn > 0 or behaviour is Behaviour.HANG:
                await self._until_client_leaves(request)
                return _nobody_reads_it()
            case Behaviour.ERROR500:
                return _error(500, "the scripted server fails, as its script says")
            case Behaviour.DISCONNECT:
                return _Disconnect()
            case Behaviour.FLAKY if self._flaked.get(session, -1) < turn:
                self._flaked[session] = turn
                if len(self._flaked) > _MAX_FLAKED:
                    del self._flaked[next(iter(self._flaked))]
                return _error(503, "the scripted server is overloaded, as its script says", retry_after=0)
            case _:
                return None

    async def _take_time(self, sample: ScriptedSample, request: Request) -> bool:
        """Take as long as sampling would; False where the client left before its end."""
        speed = self.options.tokens_per_s
        seconds = self.options.latency_s + (len(sample.ids) / speed if speed else 0.0)
        if seconds <= 0:
            return True
        watcher = asyncio.ensure_future(self._until_client_leaves(request))
        sleeper = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait((watcher, sleeper), return_when=asyncio.FIRST_COMPLETED)
            return sleeper.done()
        finally:
            for task in (watcher, sleeper):
                task.cancel()

    async def _until_client_leaves(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.counts.aborted += 1

    def _answer(
        self, asked: CompletionRequest, sample: ScriptedSample, behaviour: Behaviour, chance: random.Random
    ) -> JsonObject:
        ids, logprobs = list(sample.ids), list(sample.logprobs)
        if behaviour is Behaviour.BAD_IDS:
            ids[chance.randrange(len(ids))] = 2**31
        elif behaviour is Behaviour.SHORT_LOGPROBS:
            logprobs.pop()
        choice: JsonObject = {
            "index": 0,
            "text": self._renderer.decode(sample.ids),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.ids[-1] if sample.finish_reason == "stop" else None,
            "logprobs": None,
        }
        if asked.logprobs is not None:
            as_ids = asked.return_tokens_as_token_ids and self.options.dialect is not Dialect.TEXT
            tokens = [f"token_id:{number}" if as_ids else self._renderer.decode([number]) for number in ids]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None}
        if asked.return_token_ids and self.options.dialect is Dialect.TOKEN_IDS:
            choice |= {"token_ids": ids, "prompt_token_ids": asked.prompt}
        usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": len(ids)}
        return {
            "id": f"cmpl-scripted-{self.counts.requests}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": MODEL_ID,
            "choices": [choice],
            "usage": {**usage, "total_tokens": sum(usage.values())},
            "weight_version": self.options.weight_version,
        }


def scripted_app(service: ScriptedService) -> FastAPI:
    """The scripted model server as an ASGI application."""
    app = FastAPI(title="Scripted model server", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await service.complete(asked, request)

    @app.get("/v1/models")
    async def models() -> JsonObject:
        model = {
            "id": MODEL_ID,
            "object": "model",
            "owned_by": OWNER,
            "max_model_len": service.options.max_model_len,
        }
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(_metrics(service.counts))

    @app.get("/scripted/stats")
    async def stats() -> JsonObject:
        return asdict(service.counts)

    @app.get("/scripted/log")
    async def log() -> list[JsonObject]:
        return [asdict(exchange) for exchange in service.audit.exchanges]

    return app


def _nobody_reads_it() -> Response:
    return Response(status_code=499)


def _error(status: int, message: str, *, retry_after: int | None = None) -> Response:
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    body = {"error": {"message": message, "type": "scripted", "code": status}}
    return JSONResponse(body, status_code=status, headers=headers)


def _metrics(counts: Counts) -> str:
    """Counts in Prometheus text format, under vLLM's names where it has them."""
    values = {
        "vllm:num_requests_running": counts.running,
        "vllm:prompt_tokens_total": counts.prompt_tokens,
        "vllm:generation_tokens_total": counts.sampled_tokens,
        "scripted:requests_total": counts.requests,
        "scripted:ledger_violations_total": counts.violations,
    }
    return "".join(f"{name} {value}\n" for name, value in values.items())
