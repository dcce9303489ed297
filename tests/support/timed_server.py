"""Scripted model server with a sampling speed, pauses and weight changes, as real servers have them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel, Field

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.testing.scripted_app import ScriptedEngine, ScriptedService, TurnProgress, add_vllm
from prorl_envs.testing.server import Interface, ScriptedServer
from prorl_envs.tools.types import JsonObject

type Treatment = Literal["finish", "abort", "freeze"]


class NewVersion(BaseModel):
    """Notification that new weights have been loaded."""

    new_version: str = Field(max_length=200)


class TimedEngine(ScriptedEngine):
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
        super().__init__(version)
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
        """See `ScriptedEngine.spend`; `rid` is the request id for `abort`."""
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
                spent += self._clock.monotonic() - began
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


class TimedServer(ScriptedServer):
    """`ScriptedServer` with a `TimedEngine`.

    Args:
        interface: interface of the server.
        clock: clock for the latency; by default the machine's.
        latency_s, tokens_per_s, weight_version, steerable: see `TimedEngine`.
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
        **options: Any,
    ) -> None:
        self.engine = TimedEngine(
            clock or SystemClock(), latency_s, tokens_per_s, weight_version, steerable=steerable
        )
        super().__init__(book, interface=interface or add_steerable_vllm, engine=self.engine, **options)


def engine_of(service: ScriptedService) -> TimedEngine:
    """Return the engine of a `TimedServer`."""
    assert isinstance(service.engine, TimedEngine)
    return service.engine


def add_steerable_vllm(app: FastAPI, service: ScriptedService) -> None:
    """Add vLLM's routes, with those that exist if it runs with `VLLM_SERVER_DEV_MODE=1`."""
    add_vllm(app, service)
    engine = engine_of(service)
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
