"""Routes of the scripted model server; `server.py` runs them."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.testing.audit import Audit, AuditCounts, Dealer, Exchange
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
#: Last event of a stream.
END = "data: [DONE]\n\n"
#: Largest number of sessions in a record of failures or aborted turns; the oldest entry is removed first.
MAX_SESSIONS = 65_536
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
        text_only: answers contain no token ids, as those of servers behind the same interface.
        owner: owner of the model in the list of models.
        most: largest number of concurrent requests; further requests are answered with 503. None sets no
            limit.
    """

    mix: Mix = Mix({Behaviour.SOLVE: 1})  # noqa: RUF009  (frozen)
    unknown: Behaviour | None = None
    seed: int = 0
    noncanonical: float = 0.0
    max_model_len: int = 131_072
    text_only: bool = False
    owner: str = OWNER
    most: int | None = None


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


class _Disconnect(Response):
    """Incomplete response; uvicorn then closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"choices": [', "more_body": True})


@dataclass(frozen=True, slots=True)
class Played:
    """One answer, before conversion to a protocol's format.

    Args:
        ids: sampled token ids; wrong if the behaviour is BAD_IDS.
        logprobs: one log-probability per id; one too few if the behaviour is SHORT_LOGPROBS.
        finish_reason: reason of the end; empty during sampling.
        cached: number of tokens at the start of the prompt that a prefix cache would contain.
        version: version of the weights that sampled the last token.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    cached: int
    version: str = "scripted-0"


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """One request whose answer is known.

    Args:
        session: its session; `behaviour`: the session's behaviour.
        number: number of assistant turns in the prompt.
        cached: see `Played`.
        earlier: number of ids that an aborted request of this turn has got; `sample` comes after them.
    """

    session: str
    behaviour: Behaviour
    number: int
    prompt_ids: list[int]
    cached: int
    earlier: int
    sample: ScriptedSample


class ScriptedService:
    """Implementation of the routes.

    Args:
        renderer: tokenizer and template of the simulated model.
        book: scripts of the known tasks.
        options: options of the server.
    """

    def __init__(self, renderer: TemplateRenderer, book: ScriptBook, options: ScriptedOptions) -> None:
        self.options = options
        self.counts = AuditCounts()
        self.audit = Audit(self.counts)
        self._renderer = renderer
        self._book = book
        self._reader = PromptReader(renderer)
        self._model = ScriptedModel(renderer, book, seed=options.seed, noncanonical=options.noncanonical)
        self._dealer = Dealer(options.mix, self.counts, seed=options.seed)
        self._failed_turns: dict[str, int] = {}
        self._changed = asyncio.Event()

    @property
    def stop_ids(self) -> Sequence[int]:
        """End-of-turn ids of the simulated model."""
        return self._renderer.stop_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text."""
        return self._renderer.decode(ids)

    async def until(self, holds: Callable[[AuditCounts], bool]) -> None:
        """Wait until `holds` returns true for the counters."""
        while not holds(self.counts):
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

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
        self,
        prompt_ids: list[int],
        max_tokens: int,
        stop_ids: list[int],
        request: Request,
        **how: Any,
    ) -> Response | Played:
        """Answer one request with the session's behaviour: return the sample, or the response of a failure.

        Args: after the request, those of `_spend`.
        """
        self.counts.running += 1
        self._notify()
        try:
            turn = await self._begin(prompt_ids, max_tokens, stop_ids, request)
            if isinstance(turn, Response):
                return turn
            played = await self._spend(turn, request, **how)
            if played is None:
                return _client_left()
            self.counts.sampled_tokens += len(played.ids)
            exchange = (turn.session, turn.behaviour.value, turn.number, tuple(prompt_ids), played.ids)
            self.audit.record(Exchange(*exchange, played.finish_reason))
            return _with_faults(played, turn.behaviour, random.Random(turn.session))
        finally:
            self.counts.running -= 1
            self._notify()

    async def _begin(
        self, prompt_ids: list[int], max_tokens: int, stop_ids: list[int], request: Request
    ) -> Response | ScriptedTurn:
        prompt = self._reader.read(prompt_ids)
        key = self._book.find(prompt.first_user) or self._book.find(prompt.users)
        session = request.headers.get("x-session-id") or f"task:{key or ''}"
        fixed = self.options.unknown if key is None else None
        behaviour = fixed or self._dealer.deal(session, key or "")
        self.counts.requests += 1
        self.counts.prompt_tokens += len(prompt_ids)
        self.counts.unknown_tasks += key is None
        cached = self.audit.known(session, prompt_ids)
        self.audit.check(session, prompt_ids, prompt.assistant_turns)
        if (refusal := self._refusal(prompt_ids, max_tokens)) is not None:
            return refusal
        if self.options.most is not None and self.counts.running > self.options.most:
            self.counts.refused += 1
            return _error(503, "too many concurrent requests for the scripted server", retry_after=0)
        if (fault := await self._fault(behaviour, session, prompt.assistant_turns, request)) is not None:
            return fault
        earlier = self._sampled_before(session, len(prompt_ids))
        sample = self._model.sample(
            key, behaviour, prompt.assistant_turns, session=session, max_tokens=earlier + max_tokens
        )
        sample = sample.after(earlier).until(stop_ids)
        return ScriptedTurn(session, behaviour, prompt.assistant_turns, prompt_ids, cached, earlier, sample)

    def _sampled_before(self, session: str, prompt_length: int) -> int:
        """Return the number of ids of this turn that an aborted request has got."""
        return 0

    async def _spend(self, turn: ScriptedTurn, request: Request, **how: Any) -> Played | None:
        """Return the answer once it is sampled, here at once; None if the client has disconnected. The tests
        have a service with a speed, pauses, aborts and weight changes."""
        sample = turn.sample
        return Played(sample.ids, sample.logprobs, sample.finish_reason, turn.cached)

    def _refusal(self, prompt_ids: list[int], max_tokens: int) -> Response | None:
        if len(prompt_ids) + max_tokens <= self.options.max_model_len:
            if min(prompt_ids) >= 0 and max(prompt_ids) < self._renderer.vocab_size:
                return None
            return _error(400, "the prompt contains ids outside the vocabulary")
        limit = self.options.max_model_len
        return _error(400, f"prompt and max_tokens exceed the model's maximum context length of {limit}")

    async def _fault(
        self, behaviour: Behaviour, session: str, turn: int, request: Request
    ) -> Response | None:
        match behaviour:
            case Behaviour.HANG | Behaviour.HANG_LATER if turn > 0 or behaviour is Behaviour.HANG:
                await self._disconnected(request)
                return _client_left()
            case Behaviour.ERROR500:
                return _error(500, "the scripted server fails because of the behaviour error500")
            case Behaviour.DISCONNECT:
                return _Disconnect()
            case Behaviour.FLAKY if self._failed_turns.get(session, -1) < turn:
                self._failed_turns[session] = turn
                if len(self._failed_turns) > MAX_SESSIONS:
                    del self._failed_turns[next(iter(self._failed_turns))]
                return _error(503, "the server fails once because of the behaviour flaky", retry_after=0)
            case _:
                return None

    async def _disconnected(self, request: Request) -> None:
        """Wait until the client disconnects."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.counts.aborted += 1

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
        if body.return_token_ids and not self.options.text_only:
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
    """Add the routes that all kinds of server have, and `/scripted/...`."""

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
        return PlainTextResponse(_metrics(service.counts))

    @app.get("/scripted/stats")
    async def stats() -> JsonObject:
        return asdict(service.counts)

    @app.get("/scripted/log")
    async def log() -> list[JsonObject]:
        return [asdict(exchange) for exchange in service.audit.exchanges]


def _with_faults(played: Played, behaviour: Behaviour, chance: random.Random) -> Played:
    """Return the answer with the faults of the behaviour."""
    ids, logprobs = list(played.ids), list(played.logprobs)
    if behaviour is Behaviour.BAD_IDS:
        ids[chance.randrange(len(ids))] = 2**31
    elif behaviour is Behaviour.SHORT_LOGPROBS:
        logprobs.pop()
    return replace(played, ids=tuple(ids), logprobs=tuple(logprobs))


def event(data: JsonObject) -> str:
    """Return one event of a stream."""
    return f"data: {json.dumps(data)}\n\n"


def _client_left() -> Response:
    return Response(status_code=499)


def _error(status: int, message: str, *, retry_after: int | None = None) -> Response:
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    body = {"error": {"message": message, "type": "scripted", "code": status}}
    return JSONResponse(body, status_code=status, headers=headers)


def _metrics(counts: AuditCounts) -> str:
    """Return the counters in Prometheus text format; counters that vLLM also has get vLLM's names."""
    values = {
        "vllm:num_requests_running": counts.running,
        "vllm:prompt_tokens_total": counts.prompt_tokens,
        "vllm:generation_tokens_total": counts.sampled_tokens,
        "scripted:requests_total": counts.requests,
        "scripted:ledger_violations_total": counts.violations,
    }
    return "".join(f"{name} {value}\n" for name, value in values.items())
