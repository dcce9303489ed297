"""Routes of the scripted model server; `server.py` runs them."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from prorl_envs.clock import Clock
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.testing.audit import Audit, AuditCounts, Dealer, Exchange
from prorl_envs.testing.scripted import (
    Behaviour,
    Mix,
    PromptReader,
    ScriptBook,
    ScriptedModel,
)
from prorl_envs.testing.scripted_engine import ScriptedEngine, Treatment
from prorl_envs.tools.types import JsonObject

MODEL_ID = "scripted"
# Sessions whose first failure is recorded; the oldest are forgotten, and fail once more.
_MAX_FLAKED = 65_536
OWNER = "prorl-envs scripted model server (not a model)"


class ServerDialect(StrEnum):
    """Field of an answer with the sampled ids: current vLLM's, that of earlier versions, or none."""

    TOKEN_IDS = "token_ids"
    TOKEN_STRINGS = "token_strings"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedOptions:
    """Options of the server.

    Args:
        mix: behaviours dealt to the sessions of each task.
        unknown: behaviour if a prompt states no known task, such as a probe; None deals it from the mix.
        seed: seed of the decks, the log-probabilities and all other random choices.
        noncanonical: probability that a token is sampled as two of the same text.
        latency_s: seconds before each answer; tokens_per_s: sampling speed, None is instant.
        max_model_len: most tokens of prompt and answer; longer requests are refused with 400, as vLLM does.
        weight_version: named in every answer.
        dialect: field of answers with the sampled ids.
        protocol: the server's interface: vLLM's, SGLang's or llama.cpp's.
        generates: as vLLM, it has the route that names versions (`--enable-scale-out`).
        incremental: as SGLang, stream events hold only new tokens (`--incremental-streaming-output`).
        most: concurrent requests; further ones are refused with 503. None refuses none.
        steerable: it has the routes that pause it and name its weights.
    """

    mix: Mix = Mix({Behaviour.SOLVE: 1})  # noqa: RUF009  (frozen)
    unknown: Behaviour | None = None
    seed: int = 0
    noncanonical: float = 0.0
    latency_s: float = 0.0
    tokens_per_s: float | None = None
    max_model_len: int = 131_072
    weight_version: str = "scripted-0"
    dialect: ServerDialect = ServerDialect.TOKEN_IDS
    protocol: Literal["vllm", "sglang", "llamacpp"] = "vllm"
    generates: bool = False
    incremental: bool = False
    most: int | None = None
    steerable: bool = True


class CompletionRequest(BaseModel):
    """Fields of a completion request that the scripted server uses; other fields are ignored, as sampling
    settings do not affect a script."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: list[int] = Field(min_length=1, max_length=4_000_000)
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0)
    stop_token_ids: list[int] = Field(default=[], max_length=1000)
    stream: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class NewVersion(BaseModel):
    """Notification that other weights have been loaded."""

    new_version: str = Field(max_length=200)


class _Disconnect(Response):
    """Response that is cut off: uvicorn closes a connection whose response is left unfinished."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"choices": [', "more_body": True})


@dataclass(frozen=True, slots=True)
class Played:
    """One answer, before conversion to a protocol's format.

    Args:
        ids, logprobs, finish_reason: the "sample"; the numbers may be wrong on purpose.
        spans: as `TurnProgress.spans`.
        cached: prompt tokens that the session's server has seen before.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    spans: tuple[tuple[str, int], ...]
    cached: int

    def after(self, sent: int) -> "Played":
        """Return the answer without its first `sent` tokens."""
        return replace(self, ids=self.ids[sent:], logprobs=self.logprobs[sent:])

    @property
    def version(self) -> str:
        """Version of the weights that sampled the end of the answer."""
        return self.spans[-1][0]

    def version_spans(self) -> list[JsonObject]:
        """Return the versions and their spans of tokens, as servers write them."""
        edges = [0, *(end for _, end in self.spans)]
        return [
            {"version": version, "start": start, "end": end}
            for (version, end), start in zip(self.spans, edges, strict=False)
        ]


class ScriptedService:
    """Implementation of the routes.

    Args:
        renderer: tokenizer and template of the model it plays.
        book: the tasks it knows.
        options: options of the server.
        clock: clock of the latency.
    """

    def __init__(
        self, renderer: TemplateRenderer, book: ScriptBook, options: ScriptedOptions, clock: Clock
    ) -> None:
        self.options = options
        self.counts = AuditCounts()
        self.audit = Audit(self.counts)
        self._renderer = renderer
        self._book = book
        self._reader = PromptReader(renderer)
        self._model = ScriptedModel(renderer, book, seed=options.seed, noncanonical=options.noncanonical)
        self._dealer = Dealer(options.mix, self.counts, seed=options.seed)
        self._flaked: dict[str, int] = {}
        self._changed = asyncio.Event()
        #: For sessions whose turn was aborted: length of the prompt that continues, ids sampled so far.
        self._begun: dict[str, tuple[int, int]] = {}
        self.engine = ScriptedEngine(clock, options.latency_s, options.tokens_per_s, options.weight_version)

    @property
    def stop_ids(self) -> Sequence[int]:
        """End-of-turn ids of the model it plays."""
        return self._renderer.stop_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text."""
        return self._renderer.decode(ids)

    def told_to_abort(self) -> None:
        """Count a request to abort another request."""
        self.counts.told_to_abort += 1
        self._notify()

    async def until(self, holds: Callable[[AuditCounts], bool]) -> None:
        """Return when `holds` is true of the counters."""
        while not holds(self.counts):
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def complete(self, asked: CompletionRequest, request: Request) -> Response:
        """Answer one completion request as vLLM does, with the session's behaviour."""
        asks = (asked.prompt, asked.max_tokens, asked.stop_token_ids, request)
        if asked.stream:
            return await self.stream(*asks, lambda played, sent: self._piece(asked, played, sent))
        played = await self.play(*asks)
        if isinstance(played, Response):
            return played
        return JSONResponse(self._answer(asked, played))

    async def stream(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        stop_ids: list[int],
        request: Request,
        piece: "Callable[[Played, int], JsonObject]",
        *,
        rid: str = "",
        interval: int = 1,
    ) -> Response:
        """Stream the answer to one request in pieces, as they are sampled.

        Args: as of `play`, and
            piece: builds an event from the sample so far and the number of tokens sent before.
            interval: tokens between two events.
        """
        news: asyncio.Queue[Played | None] = asyncio.Queue()
        playing = asyncio.create_task(
            self.play(prompt_ids, max_tokens, stop_ids, request, rid, news.put_nowait)
        )
        playing.add_done_callback(lambda _: news.put_nowait(None))
        first = await news.get()
        if first is None and isinstance(failed := playing.result(), Response):
            return failed

        async def pieces() -> AsyncIterator[str]:
            sent, latest = 0, first
            while latest is not None:
                if len(latest.ids) >= sent + interval:
                    yield _event(piece(latest, sent))
                    sent = len(latest.ids)
                latest = await news.get()
            if isinstance(played := playing.result(), Played):
                yield _event(piece(played, sent))
                yield "data: [DONE]\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    def _piece(self, asked: CompletionRequest, played: "Played", sent: int) -> JsonObject:
        """Return one event, with the tokens not sent before."""
        answer = self._answer(asked, played.after(sent))
        if sent > 0:
            answer["choices"][0].pop("prompt_token_ids", None)
        answer["choices"][0]["finish_reason"] = played.finish_reason or None
        return answer

    async def play(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        stop_ids: list[int],
        request: Request,
        rid: str = "",
        told: Callable[["Played"], None] | None = None,
    ) -> "Response | Played":
        """Answer one request with the session's behaviour: with ids, or with a failure.

        Args:
            told: receives the sample so far, during sampling.
        """
        self.counts.running += 1
        self._notify()
        try:
            return await self._play(prompt_ids, max_tokens, stop_ids, request, rid, told)
        finally:
            self.counts.running -= 1
            self._notify()

    async def _play(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        stop_ids: list[int],
        request: Request,
        rid: str,
        told: Callable[["Played"], None] | None,
    ) -> "Response | Played":
        prompt = self._reader.read(prompt_ids)
        key = self._book.find(prompt.first_user) or self._book.find(prompt.users)
        session = request.headers.get("x-session-id") or f"task:{key or ''}"
        undealt = self.options.unknown if key is None else None
        behaviour = undealt or self._dealer.deal(session, key or "")
        self.counts.requests += 1
        self.counts.prompt_tokens += len(prompt_ids)
        self.counts.unknown_tasks += key is None
        cached = self.audit.known(session, prompt_ids)
        self.audit.check(session, prompt_ids, prompt.assistant_turns)
        if (refusal := self._refusal(prompt_ids, max_tokens)) is not None:
            return refusal
        if self.options.most is not None and self.counts.running > self.options.most:
            self.counts.refused += 1
            return _error(503, "the scripted server has too much to do", retry_after=0)
        if (fault := await self._fault(behaviour, session, prompt.assistant_turns, request)) is not None:
            return fault
        length, begun = self._begun.pop(session, (0, 0))
        begun = begun if length == len(prompt_ids) else 0
        sample = self._model.sample(
            key, behaviour, prompt.assistant_turns, session=session, max_tokens=begun + max_tokens
        )
        sample = sample.after(begun).until(stop_ids)

        def sampled(count: int) -> None:
            spans = ((self.engine.version, count),)
            if told is not None:
                told(Played(sample.ids[:count], sample.logprobs[:count], "", spans, cached))

        sound = behaviour not in (Behaviour.BAD_IDS, Behaviour.SHORT_LOGPROBS)  # else reported at the end
        progress = await self.engine.spend(
            len(sample.ids), rid, self._until_client_leaves(request), sampled if told and sound else None
        )
        if progress is None:
            return _nobody_reads_it()
        if progress.aborted:
            self._begun[session] = len(prompt_ids) + progress.sampled, begun + progress.sampled
            if len(self._begun) > _MAX_FLAKED:
                del self._begun[next(iter(self._begun))]
        ids = sample.ids[: progress.sampled]
        reason = "abort" if progress.aborted else sample.finish_reason
        self.counts.sampled_tokens += len(ids)
        self.audit.record(
            Exchange(session, behaviour.value, prompt.assistant_turns, tuple(prompt_ids), ids, reason)
        )
        logprobs = sample.logprobs[: progress.sampled]
        return _spoilt(
            Played(ids, logprobs, reason, tuple(progress.spans), cached), behaviour, random.Random(session)
        )

    def _refusal(self, prompt_ids: list[int], max_tokens: int) -> Response | None:
        if len(prompt_ids) + max_tokens <= self.options.max_model_len:
            if min(prompt_ids) >= 0 and max(prompt_ids) < self._renderer.vocab_size:
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

    async def _until_client_leaves(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.counts.aborted += 1

    def _answer(self, asked: CompletionRequest, played: "Played") -> JsonObject:
        ids, logprobs = list(played.ids), list(played.logprobs)
        choice: JsonObject = {
            "index": 0,
            "text": self.decode(ids),
            "finish_reason": played.finish_reason,
            "stop_reason": ids[-1] if ids and played.finish_reason == "stop" else None,
            "logprobs": None,
        }
        if asked.logprobs is not None:
            as_ids = asked.return_tokens_as_token_ids and self.options.dialect is not ServerDialect.TEXT
            tokens = [f"token_id:{number}" if as_ids else self.decode([number]) for number in ids]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None}
        if asked.return_token_ids and self.options.dialect is ServerDialect.TOKEN_IDS:
            choice |= {"token_ids": ids, "prompt_token_ids": asked.prompt}
        if len(played.spans) > 1:
            choice["weight_versions"] = played.version_spans()
        usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": len(ids)}
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
    """Make a scripted server answer as vLLM does."""

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await service.complete(asked, request)

    if not service.options.steerable:
        return

    @app.post("/pause")
    async def pause(mode: Literal["wait", "abort", "keep"] = "abort", clear_cache: bool = True) -> JsonObject:
        service.counts.emptied += clear_cache
        treatment: dict[str, Treatment] = {"wait": "finish", "abort": "abort", "keep": "freeze"}
        service.engine.pause(treatment[mode], mode)
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> JsonObject:
        service.engine.resume()
        return {"status": "resumed"}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        service.counts.emptied += 1
        return Response()

    @app.get("/weight_info")
    async def weight_info() -> JsonObject:
        return {"weight_version": service.engine.version}

    @app.post("/update_weight_version")
    async def update_weight_version(body: NewVersion) -> JsonObject:
        service.engine.version = body.new_version
        return {"success": True}


def add_common(app: FastAPI, service: ScriptedService) -> None:
    """Add the routes common to all kinds of server, and those of a scripted server only."""

    @app.get("/v1/models")
    async def models() -> JsonObject:
        model = {
            "id": MODEL_ID,
            "object": "model",
            "owned_by": OWNER if service.options.protocol == "vllm" else service.options.protocol,
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


def _spoilt(played: Played, behaviour: Behaviour, chance: random.Random) -> Played:
    """Return the answer with the errors of the behaviour."""
    ids, logprobs = list(played.ids), list(played.logprobs)
    if behaviour is Behaviour.BAD_IDS:
        ids[chance.randrange(len(ids))] = 2**31
    elif behaviour is Behaviour.SHORT_LOGPROBS:
        logprobs.pop()
    return replace(played, ids=tuple(ids), logprobs=tuple(logprobs))


def _event(data: JsonObject) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _nobody_reads_it() -> Response:
    return Response(status_code=499)


def _error(status: int, message: str, *, retry_after: int | None = None) -> Response:
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    body = {"error": {"message": message, "type": "scripted", "code": status}}
    return JSONResponse(body, status_code=status, headers=headers)


def _metrics(counts: AuditCounts) -> str:
    """Return the counters in Prometheus text format, under vLLM's names if it has them."""
    values = {
        "vllm:num_requests_running": counts.running,
        "vllm:prompt_tokens_total": counts.prompt_tokens,
        "vllm:generation_tokens_total": counts.sampled_tokens,
        "scripted:requests_total": counts.requests,
        "scripted:ledger_violations_total": counts.violations,
    }
    return "".join(f"{name} {value}\n" for name, value in values.items())
