"""Scripted model server with a sampling speed, pauses, weight changes and failures, as real servers have.

It audits its prompts: no client may tokenise a sampled text again.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.testing.scripted import Behaviour, Mix, ScriptBook
from prorl_envs.testing.scripted_app import (
    END,
    CompletionRequest,
    Played,
    ScriptedOptions,
    ScriptedService,
    ScriptedTurn,
    add_vllm,
    error,
    event,
)
from prorl_envs.testing.server import Interface, ScriptedServer
from prorl_envs.tools.types import JsonObject
from tests.support.audit import Audit, AuditCounts, Exchange

type Treatment = Literal["finish", "abort", "freeze"]


#: Largest number of sessions in a record of failures or aborted turns; the oldest entry is removed first.
_MAX_SESSIONS = 65_536


class Fault(StrEnum):
    """Failure of the server in a session."""

    HANG = "hang"
    HANG_LATER = "hang_later"  # after the first answer
    FLAKY = "flaky"  # each turn fails once
    BAD_IDS = "bad_ids"
    SHORT_LOGPROBS = "short_logprobs"
    DISCONNECT = "disconnect"


def _mix(text: str) -> Mix:
    """Return a mix of behaviours and faults."""
    return Mix.parse(text, lambda name: Fault(name) if name in set(Fault) else Behaviour(name))


class _Disconnect(Response):
    """Incomplete response; uvicorn then closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"choices": [', "more_body": True})


class NewVersion(BaseModel):
    """Notification that new weights have been loaded."""

    new_version: str = Field(max_length=200)


@dataclass(slots=True)
class TurnProgress:
    """Progress of a request.

    Args:
        total: number of ids to sample.
        spans: one pair per weight version, oldest first: the version, and the number of ids sampled up to the
            end of its use.
        aborted: the request was aborted; the ids sampled before the abort are valid.
    """

    total: int
    spans: list[tuple[str, int]] = field(default_factory=list)
    aborted: bool = False

    @property
    def sampled(self) -> int:
        return self.spans[-1][1] if self.spans else 0


@dataclass(frozen=True, slots=True)
class TimedPlayed(Played):
    """Answer with `spans` as those of `TurnProgress`."""

    spans: tuple[tuple[str, int], ...] = ()

    def after(self, sent: int) -> "TimedPlayed":
        """Return the answer without its first `sent` tokens."""
        return replace(self, ids=self.ids[sent:], logprobs=self.logprobs[sent:])

    def version_spans(self) -> list[JsonObject]:
        """Return the versions and their token ranges in the servers' JSON format."""
        edges = [0, *(end for _, end in self.spans)]
        return [
            {"version": version, "start": start, "end": end}
            for (version, end), start in zip(self.spans, edges, strict=False)
        ]


class TimedEngine:
    """Sampling time, pauses and weights.

    The sample is known from the start. The engine only determines how many of its ids have been sampled when
    a request is aborted, the server is paused or its weights change.

    Args:
        clock: clock for the sampling time.
        latency_s: seconds before the first token.
        tokens_per_s: sampling speed; None samples without delay.
        version: version of the weights.
        steerable: the server has the routes that pause it and report or set its weight version.
    """

    def __init__(
        self, clock: Clock, latency_s: float, tokens_per_s: float | None, version: str, *, steerable: bool
    ) -> None:
        self.version = version
        self.steerable = steerable
        self.pauses: list[str] = []
        self._clock = clock
        self._latency_s = latency_s
        self._tokens_per_s = tokens_per_s
        self._treatment: Treatment | None = None
        self._changed = asyncio.Event()
        self._aborted: set[str] = set()

    @property
    def paused(self) -> bool:
        return self._treatment is not None

    def pause(self, treatment: Treatment, name: str = "") -> None:
        """Start no further requests, and apply `treatment` to the requests in progress.

        Args:
            name: name for the list of pauses; by default the treatment.
        """
        self._treatment = treatment
        self.pauses.append(name or treatment)
        self._notify()

    def resume(self) -> None:
        """Resume sampling."""
        self._treatment = None
        self._notify()

    def abort(self, rid: str) -> None:
        """Abort one request."""
        self._aborted.add(rid)
        self._notify()

    async def spend(
        self,
        total: int,
        rid: str,
        disconnected: Callable[[], Awaitable[None]],
        on_progress: Callable[[int], None] | None = None,
    ) -> TurnProgress | None:
        """Wait for the time that sampling `total` ids takes.

        Args:
            rid: request id, by which the request may be aborted.
            disconnected: returns when the client disconnects.
            on_progress: called during sampling with the number of sampled ids.

        Returns:
            The progress at the end or at the abort, or None if the client disconnected before.
        """
        disconnect = asyncio.ensure_future(disconnected())
        progress = TurnProgress(total)
        spent = 0.0
        try:
            while self.paused:  # vLLM and SGLang both delay new requests during a pause
                if not await self._wait(disconnect, None):
                    return None
            while not progress.aborted and progress.sampled < total:
                version, began = self.version, self._clock.monotonic()
                seconds = self._seconds(total) - spent
                if on_progress is not None and self._tokens_per_s:
                    seconds = min(seconds, 1 / self._tokens_per_s)
                if not await self._wait(disconnect, seconds):
                    return None
                # Not more than was waited for: on a busy machine too, a stream has many parts.
                spent += min(self._clock.monotonic() - began, seconds)
                if progress.spans and progress.spans[-1][0] == version:
                    progress.spans.pop()
                progress.spans.append((version, self._sampled_after(spent, total)))
                if on_progress is not None:
                    on_progress(progress.sampled)
                progress.aborted = rid in self._aborted or (
                    self._treatment == "abort" and progress.sampled < total
                )
                while self._treatment == "freeze" and progress.sampled < total and not progress.aborted:
                    if not await self._wait(disconnect, None):
                        return None
                    progress.aborted = rid in self._aborted
            return progress
        finally:
            self._aborted.discard(rid)
            disconnect.cancel()

    def _seconds(self, total: int) -> float:
        return self._latency_s + (total / self._tokens_per_s if self._tokens_per_s else 0.0)

    def _sampled_after(self, spent: float, total: int) -> int:
        """Return the number of ids sampled after `spent` seconds."""
        if spent >= self._seconds(total) - 1e-9:
            return total
        return min(total, max(0, int((spent - self._latency_s) * (self._tokens_per_s or 0.0))))

    async def _wait(self, disconnect: asyncio.Future[None], seconds: float | None) -> bool:
        """Wait for a change, but at most `seconds`; return False if the client disconnected."""
        changed = asyncio.ensure_future(self._changed.wait())
        waits: set[asyncio.Future[Any]] = {disconnect, changed}
        if seconds is not None:
            waits.add(asyncio.ensure_future(self._clock.sleep(seconds)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return not disconnect.done()
        finally:
            for wait in waits - {disconnect}:
                wait.cancel()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class TimedService(ScriptedService):
    """Implementation of the routes, with a `TimedEngine`, faults and an audit."""

    counters = AuditCounts
    counts: AuditCounts

    def __init__(
        self,
        renderer: TemplateRenderer,
        book: ScriptBook,
        options: ScriptedOptions,
        engine: TimedEngine,
        *,
        most: int | None,
        text_only: bool,
    ) -> None:
        super().__init__(renderer, book, options)
        self.engine = engine
        self.audit = Audit(self.counts)
        self._most = most
        self._text_only = text_only
        self._failed_turns: dict[str, int] = {}
        self._cached: dict[str, int] = {}
        self._changed = asyncio.Event()
        #: By session, for aborted turns: length of the prompt that continues the turn, number of sampled ids.
        self._partial_turns: dict[str, tuple[int, int]] = {}

    async def until(self, holds: Callable[[AuditCounts], bool]) -> None:
        """Wait until `holds` returns true for the counters."""
        while not holds(self.counts):
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def told_to_abort(self) -> None:
        """Count a request to abort another request."""
        self.counts.told_to_abort += 1
        self._notify()

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """See `ScriptedService.complete`. Streams while the answer is sampled."""
        if not body.stream:
            return await super().complete(body, request)
        arguments = (body.prompt, body.max_tokens, body.stop_token_ids, request)
        return await self.stream(*arguments, lambda played, sent: self._event_data(body, played, sent))

    def answer(self, body: CompletionRequest, played: Played) -> JsonObject:
        """See `ScriptedService.answer`."""
        answer = super().answer(body, played)
        if isinstance(played, TimedPlayed) and len(played.spans) > 1:
            answer["choices"][0]["weight_versions"] = played.version_spans()
        if self._text_only:
            for name in ("token_ids", "prompt_token_ids"):
                answer["choices"][0].pop(name, None)
        return answer

    def metrics(self) -> dict[str, int]:
        """See `ScriptedService.metrics`."""
        return {**super().metrics(), "vllm:num_requests_running": self.counts.running}

    async def play(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        stop_ids: list[int],
        request: Request,
        rid: str = "",
        on_progress: Callable[[TimedPlayed], None] | None = None,
    ) -> Response | TimedPlayed:
        """See `ScriptedService.play`.

        Args:
            rid: request id for an abort.
            on_progress: called with the sample so far.
        """
        self.counts.running += 1
        self._notify()
        try:
            turn = await self._begin(prompt_ids, max_tokens, stop_ids, request)
            if isinstance(turn, Response):
                return turn
            played = await self._spend(turn, request, rid, on_progress)
            if played is None:
                return Response(status_code=499)
            self.counts.sampled_tokens += len(played.ids)
            exchange = (turn.session, turn.behaviour.value, turn.number, tuple(prompt_ids), played.ids)
            self.audit.record(Exchange(*exchange, played.finish_reason))
            return _with_faults(played, turn.behaviour, random.Random(turn.session))
        finally:
            self.counts.running -= 1
            self._notify()

    async def stream(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        stop_ids: list[int],
        request: Request,
        piece: "Callable[[TimedPlayed, int], JsonObject]",
        *,
        rid: str = "",
        interval: int = 1,
    ) -> Response:
        """Stream the answer to one request while it is sampled.

        Args:
            piece: returns the data of an event, given the sample so far and the number of tokens sent before.
            rid: request id for an abort.
            interval: smallest number of tokens in an event before the last.
        """
        updates: asyncio.Queue[TimedPlayed | None] = asyncio.Queue()
        playing = asyncio.create_task(
            self.play(prompt_ids, max_tokens, stop_ids, request, rid=rid, on_progress=updates.put_nowait)
        )
        playing.add_done_callback(lambda _: updates.put_nowait(None))
        first = await updates.get()
        if first is None and isinstance(failed := playing.result(), Response):
            return failed

        async def events() -> AsyncIterator[str]:
            sent, latest = 0, first
            while latest is not None:
                if len(latest.ids) >= sent + interval:
                    yield event(piece(latest, sent))
                    sent = len(latest.ids)
                latest = await updates.get()
            if isinstance(played := playing.result(), TimedPlayed):
                yield event(piece(played, sent))
                yield END

        return StreamingResponse(events(), media_type="text/event-stream")

    def _event_data(self, body: CompletionRequest, played: TimedPlayed, sent: int) -> JsonObject:
        """Return one event with the tokens that were not sent before."""
        answer = self.answer(body, played.after(sent))
        if sent > 0:
            answer["choices"][0].pop("prompt_token_ids", None)
        answer["choices"][0]["finish_reason"] = played.finish_reason or None
        return answer

    def _refusal(self, prompt_ids: list[int], max_tokens: int) -> Response | None:
        if (refusal := super()._refusal(prompt_ids, max_tokens)) is not None:
            return refusal
        if self._most is None or self.counts.running <= self._most:
            return None
        self.counts.refused += 1
        return error(503, "too many concurrent requests for the scripted server", retry_after=0)

    async def _fault(
        self, behaviour: StrEnum, session: str, turn: int, prompt_ids: list[int], request: Request
    ) -> Response | None:
        self._cached[session] = self.audit.known(session, prompt_ids)
        self.audit.check(session, prompt_ids, turn)
        match behaviour:
            case Fault.HANG | Fault.HANG_LATER if turn > 0 or behaviour is Fault.HANG:
                await self._disconnected(request)
                return Response(status_code=499)
            case Fault.DISCONNECT:
                return _Disconnect()
            case Fault.FLAKY if self._failed_turns.get(session, -1) < turn:
                self._failed_turns[session] = turn
                if len(self._failed_turns) > _MAX_SESSIONS:
                    del self._failed_turns[next(iter(self._failed_turns))]
                return error(503, "the server fails once because of the behaviour flaky", retry_after=0)
            case _:
                return await super()._fault(behaviour, session, turn, prompt_ids, request)

    async def _disconnected(self, request: Request) -> None:
        """Wait until the client disconnects."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.counts.aborted += 1

    def _sampled_before(self, session: str, prompt_length: int) -> int:
        length, earlier = self._partial_turns.pop(session, (0, 0))
        return earlier if length == prompt_length else 0

    async def _spend(
        self,
        turn: ScriptedTurn,
        request: Request,
        rid: str,
        on_progress: Callable[[TimedPlayed], None] | None,
    ) -> TimedPlayed | None:
        """Return the answer once it is sampled, or None if the client has disconnected."""
        sample, cached = turn.sample, self._cached.pop(turn.session, 0)

        def played(count: int, reason: str, spans: tuple[tuple[str, int], ...]) -> TimedPlayed:
            ids, logprobs = sample.ids[:count], sample.logprobs[:count]
            return TimedPlayed(ids, logprobs, reason, cached, spans[-1][0], spans)

        def sampled(count: int) -> None:
            if on_progress is not None:
                on_progress(played(count, "", ((self.engine.version, count),)))

        # Invalid samples are sent only at the end, where they get their faults.
        valid = turn.behaviour not in (Fault.BAD_IDS, Fault.SHORT_LOGPROBS)
        progress = await self.engine.spend(
            len(sample.ids),
            rid,
            lambda: self._disconnected(request),
            sampled if on_progress and valid else None,
        )
        if progress is None:
            return None
        if progress.aborted:
            there = len(turn.prompt_ids) + progress.sampled
            self._partial_turns[turn.session] = there, turn.earlier + progress.sampled
            if len(self._partial_turns) > _MAX_SESSIONS:
                del self._partial_turns[next(iter(self._partial_turns))]
        reason = "abort" if progress.aborted else sample.finish_reason
        return played(progress.sampled, reason, tuple(progress.spans))


def _with_faults(played: TimedPlayed, behaviour: StrEnum, chance: random.Random) -> TimedPlayed:
    """Return the answer with the faults of the behaviour."""
    ids, logprobs = list(played.ids), list(played.logprobs)
    if behaviour is Fault.BAD_IDS:
        ids[chance.randrange(len(ids))] = 2**31
    elif behaviour is Fault.SHORT_LOGPROBS:
        logprobs.pop()
    return replace(played, ids=tuple(ids), logprobs=tuple(logprobs))


class TimedServer(ScriptedServer):
    """`ScriptedServer` with a `TimedEngine`.

    Args:
        interface: interface of the server.
        clock: clock for the latency; by default the machine's.
        latency_s, tokens_per_s, weight_version, steerable: see `TimedEngine`.
        mix: behaviours and faults of the sessions of each task, such as "solve=2,hang=1".
        text_only: answers contain no token ids, as those of servers behind the same interface.
        most: largest number of concurrent requests; further requests are answered with 503. None sets no
            limit.
        options: as for `ScriptedServer`.
    """

    engine: TimedEngine

    def __init__(
        self,
        book: ScriptBook | None = None,
        *,
        interface: Interface | None = None,
        clock: Clock | None = None,
        latency_s: float = 0.0,
        tokens_per_s: float | None = None,
        weight_version: str = "scripted-0",
        steerable: bool = True,
        mix: str = "solve",
        text_only: bool = False,
        most: int | None = None,
        **options: Any,
    ) -> None:
        self.engine = TimedEngine(
            clock or SystemClock(), latency_s, tokens_per_s, weight_version, steerable=steerable
        )
        super().__init__(
            book,
            interface=interface or add_steerable_vllm,
            service=partial(TimedService, engine=self.engine, most=most, text_only=text_only),
            mix=_mix(mix),
            **options,
        )

    @property
    def counts(self) -> AuditCounts:
        """Current counters."""
        return timed(self._service).counts

    @property
    def exchanges(self) -> Sequence[Exchange]:
        """The last requests and answers, oldest first."""
        return tuple(timed(self._service).audit.exchanges)

    async def until(self, holds: Callable[[AuditCounts], bool]) -> None:
        """Wait until `holds` returns true for the counters.

        Example: `await server.until(lambda counts: counts.running == 1)`.
        """
        await timed(self._service).until(holds)


def timed(service: ScriptedService) -> TimedService:
    """Return the service of a `TimedServer`."""
    assert isinstance(service, TimedService)
    return service


def engine_of(service: ScriptedService) -> TimedEngine:
    """Return the engine of a `TimedServer`."""
    return timed(service).engine


def add_steerable_vllm(app: FastAPI, service: ScriptedService) -> None:
    """Add vLLM's routes, with those that exist if it runs with `VLLM_SERVER_DEV_MODE=1`."""
    service = timed(service)
    add_vllm(app, service)
    engine = service.engine
    if not engine.steerable:
        return

    @app.post("/pause")
    async def pause(mode: Literal["wait", "abort", "keep"] = "abort", clear_cache: bool = True) -> JsonObject:
        service.counts.emptied += clear_cache
        treatment: dict[str, Treatment] = {"wait": "finish", "abort": "abort", "keep": "freeze"}
        engine.pause(treatment[mode], mode)
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> JsonObject:
        engine.resume()
        return {"status": "resumed"}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        service.counts.emptied += 1
        return Response()

    @app.get("/weight_info")
    async def weight_info() -> JsonObject:
        return {"weight_version": engine.version}

    @app.post("/update_weight_version")
    async def update_weight_version(body: NewVersion) -> JsonObject:
        engine.version = body.new_version
        return {"success": True}
